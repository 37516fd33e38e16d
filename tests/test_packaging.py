"""The sdist is complete, the wheel works by itself, and a missing library stops the build with its cure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dcpring import _C

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "Makefile")
FOLDERS = ("csrc", "python", "docs")
ROUND_TRIP = """
import sys, torch, dcpring
import torch.distributed.checkpoint as dcp
assert dcpring.__file__.startswith(sys.argv[1]), dcpring.__file__
saved = {"w": torch.randn(300_000), "step": 7}
dcp.save(saved, storage_writer=dcpring.RingWriter(sys.argv[2]), no_dist=True)
loaded = {"w": torch.zeros(300_000), "step": 0}
dcp.load(loaded, storage_reader=dcpring.RingReader(sys.argv[2]), no_dist=True)
assert torch.equal(saved["w"], loaded["w"]) and loaded["step"] == 7
"""


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository, without anything that was built."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "*.o")
        )
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """Built from the sdist, as a user's pip does."""
    made = run(sys.executable, "setup.py", "-q", "sdist", cwd=source)
    assert made.returncode == 0, made.stderr
    (sdist,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(source / "unpacked", filter="data")
    (unpacked,) = (source / "unpacked").iterdir()
    built = run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", source / "wheels", ".",
        cwd=unpacked,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (path,) = (source / "wheels").glob("*.whl")
    return path


def test_wheel_is_for_every_python_from_311_on(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_wheel_holds_the_package_and_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"dcpring/{path.name}" for path in (ROOT / "python" / "dcpring").glob("*.py*")}
    assert modules | {"dcpring/_C.abi3.so", "dcpring/py.typed", "dcpring/_C.pyi"} <= names
    assert not any(name.endswith((".c", ".h")) for name in names)


def test_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    done = run(
        sys.executable, "-W", "ignore", "-c", ROUND_TRIP, installed, tmp_path / "checkpoint",
        cwd=tmp_path, PYTHONPATH=str(installed),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


STARTUP = """
import site, sys
site.addsitedir(sys.argv[1])
if "dcpring" in sys.modules:
    from dcpring.integrations.install import current
    print(current() is not None, [name for name in sys.modules if name == "torch"])
"""


@pytest.mark.parametrize(("variable", "said"), [("", ""), ("0", ""), ("1", "True []")])
def test_wheel_installs_itself_where_the_environment_asks_for_it(
    variable: str, said: str, wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = run(sys.executable, "-S", "-c", STARTUP, tmp_path, cwd=tmp_path, DCPRING_INSTALL=variable, PYTHONPATH="")
    assert (done.stdout.strip(), done.stderr) == (said, "")


def test_an_editable_installation_does_so_too(source: Path, tmp_path: Path) -> None:
    made = run(sys.executable, "setup.py", "-q", "editable_wheel", "--dist-dir", tmp_path, cwd=source)
    assert made.returncode == 0, made.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        assert b"DCPRING_INSTALL" in wheel.read("dcpring_install.pth")
        (record,) = (name for name in wheel.namelist() if name.endswith("/RECORD"))
        assert {line.split(",")[0] for line in wheel.read(record).decode().splitlines()} == set(wheel.namelist())


def test_extension_exports_only_its_init_and_needs_no_dev_library(wheel: Path, tmp_path: Path) -> None:
    extension = Path(zipfile.ZipFile(wheel).extract("dcpring/_C.abi3.so", tmp_path))
    symbols = run("nm", "-D", "--defined-only", extension, cwd=tmp_path).stdout.split("\n")
    assert [line.split()[-1] for line in symbols if " T " in line] == ["PyInit__C"]
    needed = run("readelf", "-d", extension, cwd=tmp_path).stdout
    archives = run("gcc", "-print-file-name=liburing.a", cwd=tmp_path).stdout.strip()
    if os.path.isabs(archives):
        assert "liburing" not in needed
        assert "libdeflate" not in needed
    assert "libtorch" not in needed


def has_assertions(extension: Path) -> bool:
    return b"__assert_fail" in extension.read_bytes()


def test_assertions_are_off_in_the_wheel_and_on_in_tests(wheel: Path, tmp_path: Path) -> None:
    assert not has_assertions(Path(zipfile.ZipFile(wheel).extract("dcpring/_C.abi3.so", tmp_path)))
    assert _C.__file__ is not None and has_assertions(Path(_C.__file__)) == ("DCPRING_ASSERTING" in os.environ)


FREE_THREADED = """
import runpy, sys, sysconfig
real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: 1 if name == "Py_GIL_DISABLED" else real(name)
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
"""


def test_a_free_threaded_python_is_told_what_to_use(source: Path, tmp_path: Path) -> None:
    built = run(
        sys.executable, "-W", "ignore", "-c", FREE_THREADED, "build_ext", "--build-lib", tmp_path / "lib",
        "--build-temp", tmp_path / "tmp", cwd=source,
    )  # fmt: skip
    assert built.returncode != 0
    assert built.stderr.rstrip().endswith("with the GIL.") and "free-threaded" in built.stderr
    assert not list(tmp_path.rglob("*.o"))


def test_missing_library_stops_the_build_with_the_package_to_install(source: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\nfor part; do case "$part" in *deflate*) exit 1;; esac; '
        'grep -qs libdeflate.h "$part" && exit 1; done\nexec gcc "$@"\n'
    )
    compiler.chmod(0o755)
    built = run(
        sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "tmp",
        cwd=source, CC=str(compiler),
    )  # fmt: skip
    assert built.returncode != 0
    assert "apt-get install libdeflate-dev" in built.stderr
    assert "liburing-dev" not in built.stderr.split("apt-get install")[1]
