"""Scripts in processes that fork from one that has imported what training needs. (A short run takes a quarter of the time so.)"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["recipes.cpu", "train.eagle3", "train.dflash", "train.dspark", "accelerate.commands.launch"])


def fork_script(*words: str, cwd: Path, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """What run_script() does, of a script's path, or of -m and a module, and its words."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        process = FORKS.Process(target=_forked, args=(words, cwd, {**os.environ, **environment}, out.name, err.name))
        process.start()
        process.join(900)
        status, shown = process.exitcode, (out.read(), err.read())
        process.kill()
    assert status == expect, f"{words} ended with {status}\n{shown[0]}\n{shown[1]}"
    return subprocess.CompletedProcess(list(words), status, *shown)


def _forked(words: Sequence[str], cwd: Path, environment: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
