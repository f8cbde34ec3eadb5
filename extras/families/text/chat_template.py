"""Render a tokenizer's chat template, which may be a stranger's, in a process of its own with limits.

transformers' sandbox keeps a template from files and code, not from endless loops and texts without end.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.cli import UserError, one_line

CPU_S, WALL_S = 10, 60
MEMORY = 256 << 20  # bytes, beside those of the process that it is forked from
LONGEST = 4 << 20  # bytes of text
DONE, FAILED = b"+", b"-"


def render(tokenizer: Any, conversation: list[dict[str, str]]) -> str:
    """The conversation as the template writes it, up to where the answer begins.

    UserError if the template fails, or takes longer than CPU_S, more than MEMORY or writes more than LONGEST.
    """
    context = multiprocessing.get_context("fork")  # quick, and without CUDA calls
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(theirs, tokenizer, conversation), daemon=True)
    process.start()
    theirs.close()
    try:
        reply = ours.recv_bytes() if ours.poll(WALL_S) else b""
    except (EOFError, OSError):  # ended by a limit
        reply = b""
    finally:
        process.kill()
        process.join()
    what, text = reply[:1], reply[1:].decode(errors="replace")
    if what == DONE:
        return text
    why = text or f"it takes more than {CPU_S} s"
    raise UserError(f"the tokenizer's chat template fails: {why}: mend it, or continue a text with --prompt")


def _render(pipe: Connection, tokenizer: Any, conversation: list[dict[str, str]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills this process
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, CPU_S)
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        reply = DONE + text.encode(errors="replace")
    except MemoryError:
        reply = FAILED + f"it takes more than {MEMORY >> 20} MiB".encode()
    except Exception as error:  # whatever a template's expressions raise
        reply = FAILED + one_line(error)[:200].encode()
    if len(reply) > LONGEST:
        reply = FAILED + f"it writes more than {LONGEST:,} bytes".encode()
    pipe.send_bytes(reply)


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
