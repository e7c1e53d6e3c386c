"use strict";
(() => {
  const say = document.getElementById("say");
  const root = document.documentElement;
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % 3];
    if (next === "auto") delete root.dataset.theme; else root.dataset.theme = next;
    button.textContent = next[0].toUpperCase() + next.slice(1);
    button.setAttribute("aria-label", "Colours: " + (next === "auto" ? "follow the system" : next));
  });

  for (const figure of document.querySelectorAll("figure[data-key]")) {
    const svg = figure.querySelector("svg.chart");
    const tip = figure.querySelector(".tip");
    const cursor = svg.querySelector(".cursor");
    const upright = "y" in svg.dataset;
    const places = (upright ? svg.dataset.y : svg.dataset.x).split(" ").map(Number);
    const heads = [...figure.querySelectorAll("thead th")].map((cell) => cell.textContent);
    const rows = [...figure.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
    let at = -1;

    const show = (index, speak) => {
      at = Math.max(0, Math.min(places.length - 1, index));
      const row = rows[at];
      if (!row) return;
      tip.replaceChildren();
      row.forEach((text, column) => {
        const line = document.createElement(column ? "div" : "b");
        line.textContent = heads[column] + " " + text;
        tip.append(line);
      });
      const scale = svg.clientWidth / svg.viewBox.baseVal.width;
      if (!upright) {
        cursor.setAttribute("x1", places[at]);
        cursor.setAttribute("x2", places[at]);
        cursor.style.visibility = "visible";
      }
      tip.hidden = false;
      tip.style.top = upright ? places[at] * scale + 16 + "px" : "0";
      const x = upright ? 0 : places[at] * scale;
      const right = x < svg.clientWidth / 2;
      tip.style.left = right ? x + 10 + "px" : "auto";
      tip.style.right = right ? "auto" : svg.clientWidth - x + 10 + "px";
      if (speak) say.textContent = row.map((text, column) => heads[column] + " " + text).join(", ");
    };
    const hide = () => { tip.hidden = true; cursor.style.visibility = "hidden"; at = -1; };
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const from = upright ? event.clientY - box.top : event.clientX - box.left;
      const x = from * svg.viewBox.baseVal.width / box.width;
      let best = 0;
      places.forEach((place, index) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = index; });
      show(best, false);
    };
    svg.addEventListener("pointermove", nearest);
    svg.addEventListener("pointerdown", nearest);
    svg.addEventListener("pointerleave", hide);
    figure.addEventListener("blur", hide);
    figure.addEventListener("keydown", (event) => {
      if (event.target !== figure) return;
      const moves = { ArrowRight: at + 1, ArrowLeft: at < 0 ? places.length - 1 : at - 1, Home: 0, End: places.length - 1 };
      if (event.key === "Escape") hide();
      else if (event.key in moves) { show(moves[event.key], true); event.preventDefault(); }
    });
  }
  root.dataset.ready = "yes";
})();
