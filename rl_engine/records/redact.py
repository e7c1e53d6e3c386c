"""Removal of secrets from what is written into a run directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?i)(token(?!ize)|secret|passw|passphrase|api_?key|access_?key|private_?key|credential|auth|cookie|_key$|^key$"
    # RAY_PW, DB_PASS2, REDIS_DSN; PWD and OLDPWD are folders.
    r"|(?:_|^)(?:pw|pass|psw|jwt|dsn|sas|otp)(?:_|\d|$)|_pwd(?:_|\d|$)|pw$|(?<!by)(?<!com)pass$)"
)
_SECRET_TEXT = re.compile(
    r"hf_[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|sk-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|A(?:KIA|SIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
# Up to the last @ of the host's part: a user may be missing, a password may hold @, and / where it is no port.
_USER_INFO = re.compile(r"(?<=://)(?:[^/\s:@]*:(?!\d+(?:[/\s]|$))[^\s\"'<>]+|[^/\s\"'<>]+)(?=@)")
# The same without a scheme, user:password@host; digests of images (name:tag@sha256:...) are none.
_BARE_USER_INFO = re.compile(r"(?<![\w/:.@\]-])[\w.+-]+:[^\s:/@\"'<>]+(?:@[^\s:/@\"'<>]+)*(?=@(?!sha\d)[A-Za-z\d])")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_ASSIGNMENT = re.compile(
    # Counts of tokens are no secrets: of names with "token" only those that end in it, and no plain number.
    r"(?i)([\w-]*(?:token[\"']?\s*[=:]\s*[\"']?(?![\d.]+\b)"
    r"|(?:secret|password|passwd|api_?key|access_?key|credential)[\w-]*[\"']?\s*[=:]\s*[\"']?"
    r"|_(?:pw|pwd|pass)=[\"']?))([^\s\"',;&]{6,})"
)

# Variables worth keeping: what can change numbers or placement. Everything else stays out of the record.
_KEPT_PREFIXES: tuple[str, ...] = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "GOMP_",
    "CUDA_",
    "HIP_",
    "ROCR_",
    "NCCL_",
    "RCCL_",
    "TORCH",
)
_KEPT_PREFIXES += ("PYTORCH_", "NVTE_", "VLLM_", "RAY_", "RLK_", "RL_KERNEL_", "TRITON_", "CUBLAS_", "CUDNN_")
_KEPT_NAMES = frozenset({"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV"})


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds a secret by its name."""
    return _SECRET_NAME.search(name) is not None


def redact_text(text: str, secrets: tuple[str, ...] = ()) -> str:
    """``text`` with known secret shapes, URL credentials, ``token=...`` assignments and ``secrets`` themselves removed.

    ``secrets`` are literal values (see :func:`secret_values`); those shorter than 6 characters are ignored.
    """
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= 6:
            text = text.replace(value, REDACTED)
    text = _SECRET_TEXT.sub(REDACTED, text)
    text = _BARE_USER_INFO.sub(REDACTED, _USER_INFO.sub(REDACTED, text))
    text = _BEARER.sub(lambda match: f"{match[1]} {REDACTED}", text)
    return _ASSIGNMENT.sub(lambda match: match[1] + REDACTED, text)


def secret_values(variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Values of the (process's) environment variables whose names say that they are secret."""
    source = os.environ if variables is None else variables
    return tuple(value for name, value in source.items() if is_secret_name(name) and len(value) >= 6)


def redact_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allow-listed environment variables, sorted, with secret values replaced."""
    source = dict(os.environ if variables is None else variables)
    secrets = secret_values(source)
    kept = {}
    for name in sorted(source):
        if name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES):
            kept[name] = REDACTED if is_secret_name(name) else redact_text(source[name], secrets)
    return kept
