"""Records to tables, figures and one HTML file. Reads run directories; needs no torch and no engine."""
