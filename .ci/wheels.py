"""Builds what a release consists of into dist/: the sdist, and from it a wheel for each architecture.

`make wheels` runs it, with the Python of an environment that has the packages of wheels.txt. Everything is compiled on
this machine, also for the other architecture, by clang against glibc 2.28 (`python -m ziglang cc -target
aarch64-linux-gnu.2.28`): it runs wherever torch's own wheels do. liburing and libdeflate are built from Debian's source
packages and linked statically.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import abi3info
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.28"
FLAGS = "-O2 -g0 -fPIC -fvisibility=hidden"
UNUSED = "-Wno-unused-function"
"""clang warns of functions that only assertions call, which are off."""


@dataclass(frozen=True)
class Library:
    """A source package of Debian 12, whose libraries the tests run with.

    Attributes:
        name: the package's.
        version: the package's, with Debian's revision.
        sha256: of upstream's archive.
        made: what its makefile is asked for.
        headers: the folder with its headers, or the only one.
        license: the text that has to go with a copy.
    """

    name: str
    version: str
    sha256: str
    made: str
    headers: str
    license: str

    @property
    def archive(self) -> str:
        return f"{self.name}_{self.version.partition('-')[0]}.orig.tar.gz"


LIBRARIES = (
    Library(
        *("liburing", "2.3-3", "2eac26f880125d83f75ba8641fde5d88226dd352d3cee95d45a9128758a8f1be"),
        *("src/liburing.a", "src/include", "LICENSE"),
    ),
    Library(
        *("libdeflate", "1.14-1", "89e7df898c37c3427b0f39aadcf733731321a278771d20fc553f92da8d4808ac"),
        *("libdeflate.a", "libdeflate.h", "COPYING"),
    ),
)


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **env}, check=True)


def unpack(archive: Path, folder: Path) -> Path:
    """The only folder that is in the archive, now in this one."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


# ---- the libraries ----


def fetch(library: Library) -> Path:
    """Upstream's archive, by apt-get, which is given lists of its own: the system's stay as they are."""
    archive = WORK / "sources" / library.archive
    if not archive.exists():
        apt = WORK / "apt"
        for folder in ("lists/partial", "cache/archives/partial", "parts"):
            (apt / folder).mkdir(parents=True, exist_ok=True)
        listed = [path.read_text() for path in Path("/etc/apt/sources.list.d").glob("*.sources")]
        sources = "\n\n".join(re.sub(r"^Types:.*$", "Types: deb-src", text, flags=re.MULTILINE) for text in listed)
        (apt / "parts" / "all.sources").write_text(sources)
        options = (
            "Etc::sourcelist=-",
            f"Etc::sourceparts={apt}/parts",
            f"State::lists={apt}/lists",
            f"Cache={apt}/cache",
        )
        command = ["apt-get", "-qq", *(f"-oDir::{option}" for option in options), "-oAPT::Sandbox::User=root"]
        archive.parent.mkdir(parents=True, exist_ok=True)
        try:
            run(*command, "update")
            run(*command, "source", "--download-only", f"{library.name}={library.version}", cwd=archive.parent)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{error}: where there is no Debian 12, put {library.archive} into {archive.parent} first.")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != library.sha256:
        sys.exit(f"{archive} is not the file that .ci/wheels.py names: its SHA-256 is not {library.sha256}.")
    return archive


def compiler(folder: Path, architecture: str) -> Path:
    """A compiler of that architecture which has the libraries beside it, and says where, as gcc does."""
    zig, target = f"'{sys.executable}' -m ziglang", f"{architecture}-linux-gnu.{GLIBC}"
    scripts = {
        "cc": f'case "$1" in -print-file-name=*) echo "{folder}/lib/${{1#*=}}"; exit;; esac\n'
        f"exec {zig} cc -target {target} -I'{folder}/include' \"$@\"",
        "ar": f'exec {zig} ar "$@"',
    }
    for name, text in scripts.items():
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin" / "cc"


def build_libraries(folder: Path, cc: Path) -> None:
    """lib/*.a, include/ and licenses/ of all, by their own makefiles."""
    for name in ("include", "lib", "licenses"):
        (folder / name).mkdir()
    for library in LIBRARIES:
        source = unpack(fetch(library), folder / library.name)
        if (source / "configure").exists():
            run("./configure", f"--cc={cc}", cwd=source)
        made, headers = source / library.made, source / library.headers
        run("make", "-s", made.name, f"CC={cc}", f"AR={cc.with_name('ar')}", f"CFLAGS={FLAGS}", cwd=made.parent)
        shutil.copy(made, folder / "lib")
        if headers.is_dir():
            shutil.copytree(headers, folder / "include", dirs_exist_ok=True)
        else:
            shutil.copy(headers, folder / "include")
        shutil.copy(source / library.license, folder / "licenses" / f"LICENSE.{library.name}")


def check_headers(folder: Path, cc: Path) -> None:
    """Python's headers are those of this machine; the sizes that they state must be true for the other one too."""
    header = Path(sysconfig.get_config_h_filename()).read_text()
    types = {"VOID_P": "void *", "_BOOL": "_Bool"}
    lines = [f"#include <{name}.h>" for name in ("pthread", "stdint", "stdio", "sys/types", "time", "wchar")]
    for name, size in re.findall(r"^#define SIZEOF_(\w+) (\d+)", header, re.MULTILINE):
        of = types.get(name) or (name.lower() if name.endswith("_T") else name.lower().replace("_", " "))
        lines.append(f'_Static_assert(sizeof({of}) == {size}, "{name}");')
    (folder / "sizes.c").write_text("\n".join(lines))
    run(cc, "-c", "-o", folder / "sizes.o", folder / "sizes.c")


# ---- the wheels ----


def build_wheel(source: Path, folder: Path, cc: Path, architecture: str) -> Path:
    """The wheel as setup.py makes it, for that architecture's Linux in general."""
    shutil.copytree(folder / "licenses", source, dirs_exist_ok=True)
    run(
        sys.executable, "setup.py", "-q", "build", "--build-base", folder / "build",
        "bdist_wheel", "--bdist-dir", folder / "bdist", "--dist-dir", folder, "--plat-name", f"linux_{architecture}",
        cwd=source, CC=str(cc), LDSHARED=f"{cc} -shared -s", CFLAGS=FLAGS, DCPRING_CFLAGS=f"-Werror {UNUSED}",
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_limited_api(wheel: Path) -> None:
    """Every symbol of Python that the extension needs is in the stable ABI of 3.11."""
    with zipfile.ZipFile(wheel).open("dcpring/_C.abi3.so") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        needed = {
            each.name for each in symbols if each["st_shndx"] == "SHN_UNDEF" and each.name.startswith(("Py", "_Py"))
        }
    stable = {
        symbol.name: info.added for table in (abi3info.FUNCTIONS, abi3info.DATAS) for symbol, info in table.items()
    }
    wrong = sorted(name for name in needed if name not in stable or stable[name] > abi3info.models.PyVersion(3, 11))
    if wrong or not needed:
        sys.exit(f"{wheel.name}: not in the stable ABI of Python 3.11: {', '.join(wrong)}")


def make_wheel(source: Path, architecture: str) -> None:
    folder = WORK / architecture
    shutil.rmtree(folder, ignore_errors=True)
    cc = compiler(folder, architecture)
    build_libraries(folder, cc)
    check_headers(folder, cc)
    built = build_wheel(source, folder, cc, architecture)
    check_limited_api(built)
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat", "-w", DIST, built, PATH=tools)
    (wheel,) = DIST.glob(f"*-manylinux_{GLIBC.replace('.', '_')}_{architecture}.whl")
    run(sys.executable, "-m", "auditwheel", "show", wheel)


def main() -> None:
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(WORK / "cache"))
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    source = unpack(sdist, WORK / "source")
    for architecture in sys.argv[1:] or ARCHITECTURES:
        make_wheel(source, architecture)


if __name__ == "__main__":
    main()
