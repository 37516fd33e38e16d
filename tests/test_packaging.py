"""The sdist is complete, the wheel works by itself, and a missing library stops the build with its cure.

The wheel is built from the sdist, as a user's pip does it. DCPRING_WHEEL=dist/dcpring-...whl names one that is there
already (`make wheels`), for which the same must hold.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from dcpring import _C

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCES = [*(ROOT / ".gitignore").read_text().replace("/", "").split(), ".git"]
LIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-aarch64.so.1"}
"""What is part of glibc, and what old ones had beside it."""


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository, without anything that was built."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    made = run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder, cwd=source)
    assert made.returncode == 0, made.stderr
    (packed,) = folder.iterdir()
    assert run("tar", "-xf", packed, cwd=folder).returncode == 0
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest) -> Path:
    if given := os.environ.get("DCPRING_WHEEL"):
        return Path(given).resolve()
    sdist: Path = request.getfixturevalue("sdist")
    built = run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", "wheels", ".", cwd=sdist
    )
    assert built.returncode == 0, built.stderr
    (path,) = (sdist / "wheels").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def extension(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(zipfile.ZipFile(wheel).extract("dcpring/_C.abi3.so", tmp_path_factory.mktemp("extension")))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that has the wheel, and torch and the like from where this one has them."""
    if not wheel.stem.endswith(f"_{platform.machine()}"):
        pytest.skip("the wheel is for other machines")
    folder = tmp_path_factory.mktemp("installed")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / "bin" / "python"
    done = run(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel,
        cwd=folder, PYTHONPATH="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "torch_is_here.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_sdist_holds_everything(source: Path, sdist: Path) -> None:
    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    assert files(source) - files(sdist) == set()


def test_wheel_is_for_every_python_from_311_on(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_wheel_holds_the_package_and_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "python" / "dcpring"
    modules = {
        f"dcpring/{path.relative_to(package)}" for path in package.rglob("*.py*") if path.suffix in (".py", ".pyi")
    }
    assert modules | {"dcpring/_C.abi3.so", "dcpring/py.typed"} <= names
    assert not any(name.endswith((".c", ".h", ".pyc", ".md")) for name in names)
    licenses = {path.name for path in map(Path, names) if path.parent.name == "licenses"}
    linked = {"LICENSE.liburing", "LICENSE.libdeflate"} if "DCPRING_WHEEL" in os.environ else set()
    assert licenses == {"LICENSE"} | linked


def test_wheel_works_by_itself(installed: Path, tmp_path: Path) -> None:
    done = run(installed, ROOT / "tests" / "smoke.py", tmp_path, cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "works here" in done.stdout


def about_package(source: Path, folder: Path, **env: str) -> str:
    done = run(sys.executable, "setup.py", "-q", "egg_info", "-e", folder, cwd=source, GITHUB_REPOSITORY="", **env)
    assert done.returncode == 0, done.stderr
    return (folder / "dcpring.egg-info" / "PKG-INFO").read_text()


def test_links_of_the_package_lead_to_the_repository(source: Path, tmp_path: Path) -> None:
    """Where a release is built the address is known; an index of packages has no files for relative links."""
    told = about_package(source, tmp_path, DCPRING_HOME="https://example.org/dcpring")
    links = re.findall(r"\]\(([^)]*)\)", told)
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    assert "](https://example.org/dcpring/raw/main/benchmarks/" in told
    assert "Project-URL: Repository, https://example.org/dcpring\n" in told
    assert "](docs/howto/README.md)" in about_package(source, tmp_path)


def fast_crcs(extension: Path) -> int:
    """How often PCLMULQDQ is in the code, or PMULL and the like for aarch64."""
    code = extension.read_bytes()
    if "X86-64" in run("readelf", "-h", extension, cwd=extension.parent).stdout:
        return code.count(b"\x66\x0f\x3a\x44")
    words = memoryview(code[: len(code) // 4 * 4]).cast("I")
    return sum(word & 0xBFE0FC00 == 0x0EE0E000 or word & 0xFFE0FC00 == 0x9AC04C00 for word in words)


def test_a_release_knows_the_processors_instructions_for_crcs(extension: Path) -> None:
    """Compiled in, and chosen where it runs. Elsewhere it is the installed libdeflate that has them, or not."""
    assert fast_crcs(extension) > 10 or "DCPRING_WHEEL" not in os.environ


CRCS = """
import struct, zlib
from dcpring import _C
data = bytes(range(256)) * 400
for start in range(9):
    for size in (0, 1, 15, 16, 63, 64, 65, 1000, 100_000):
        part = data[start:start + size]
        assert _C.crc32(part, 7) == zlib.crc32(part, 7), (start, size)
halves = struct.pack("<40H", *range(0x3c00, 0x3c28))
floats = struct.pack("<40f", *(1 + i / 1024 for i in range(40)))
assert _C.convert("float16", "float32", halves) == floats and _C.convert("float32", "float16", floats) == halves
print("right")
"""


@pytest.mark.parametrize("processor", ["qemu64", "Westmere"])
def test_wheel_runs_on_any_processor(processor: str, installed: Path, tmp_path: Path) -> None:
    """The plain one has no more than every x86-64 has, and no PCLMUL; the other has that, but no AVX."""
    if platform.machine() != "x86_64":
        pytest.skip("qemu is asked for processors of x86-64")
    done = run(
        "qemu-x86_64", "-cpu", processor, os.path.realpath(installed), "-S", "-c", CRCS,
        cwd=tmp_path, LD_PRELOAD="", PYTHONPATH=str(next(installed.parent.parent.glob("lib/python*/site-packages"))),
    )  # fmt: skip
    assert done.stdout == "right\n", (done.returncode, done.stderr)


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


def test_extension_exports_only_its_init_and_needs_no_library(extension: Path, tmp_path: Path) -> None:
    listed = run("readelf", "-W", "--dyn-syms", extension, cwd=tmp_path).stdout.splitlines()
    rows = [line.split() for line in listed if "FUNC" in line or "OBJECT" in line]
    assert [row[7] for row in rows if row[6] != "UND"] == ["PyInit__C"]
    dynamic = run("readelf", "-W", "-d", extension, cwd=tmp_path).stdout
    assert "PATH" not in dynamic or "DCPRING_WHEEL" not in os.environ
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", dynamic))
    archives = [
        run("gcc", f"-print-file-name=lib{name}.a", cwd=tmp_path).stdout.strip() for name in ("uring", "deflate")
    ]
    if "DCPRING_WHEEL" in os.environ or all(os.path.isabs(archive) for archive in archives):
        assert needed <= LIBC, needed


def has_assertions(extension: Path) -> bool:
    return b"__assert_fail" in extension.read_bytes()


def test_assertions_are_off_in_the_wheel_and_on_in_tests(extension: Path) -> None:
    assert not has_assertions(extension)
    assert _C.__file__ is not None and has_assertions(Path(_C.__file__)) == ("DCPRING_ASSERTING" in os.environ)


def test_what_only_tests_call_is_in_no_wheel(extension: Path) -> None:
    hooks = {"arm_fault", "disarm_fault", "watch_gil", "start_recording", "stop_recording", "keep_for"}
    assert hooks <= set(dir(_C))
    data = extension.read_bytes()
    assert b"release_kept" in data and not [name for name in hooks if name.encode() in data]


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


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_waits_for_another_apt_get(tmp_path: Path) -> None:
    """On a fresh machine one often runs. The second call finds the lock free; what else fails is not tried again."""
    locked = 'echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)"; exit 100'
    broken = "no network"
    fakes = {
        "dpkg-query": "exit 1",
        "sudo": 'exec "$@"',
        "apt-get": f'echo "$*" >>calls; case "$(wc -l <calls)" in 1) {locked};; 4) echo "E: {broken}"; exit 100; esac',
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = ("make", "-s", "-f", ROOT / "Makefile", "build/.system", "SYSTEM_PACKAGES=gcc", "APT_PAUSE=0")
    path = f"{tmp_path}:{os.environ['PATH']}"
    first = run(*command, cwd=tmp_path, PATH=path)
    assert first.returncode == 0 and "waiting for it" in first.stdout, (first.stdout, first.stderr)
    waits = "-qq -o DPkg::Lock::Timeout=600"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"{waits} update",
        f"{waits} update",
        f"{waits} install -y gcc",
    ]
    (tmp_path / "build" / ".system").unlink()
    second = run(*command, cwd=tmp_path, PATH=path)
    assert second.returncode != 0 and broken in second.stdout and "Install these packages" in second.stdout
    assert len((tmp_path / "calls").read_text().splitlines()) == 4
