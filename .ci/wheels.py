"""Builds what a release consists of into dist/: the sdist, and from it a wheel for each architecture.

`make wheels` runs it, with the Python of an environment that has the packages of wheels.txt. Everything is compiled on
this machine, also for the other architecture, by clang against glibc 2.28 (`python -m ziglang cc -target
aarch64-linux-gnu.2.28`): it runs wherever torch's own wheels do. liburing and libdeflate are built from Debian's source
packages and linked statically.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import abi3info
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.28"
SUITE = "trixie"
"""Of Debian, whose source packages have the libraries: their older versions do not know what a newer clang can do."""
FLAGS = "-O2 -g0 -fPIC -fvisibility=hidden"
UNUSED = "-Wno-unused-function"
"""clang warns of functions that only assertions call, which are off."""


@dataclass(frozen=True)
class Library:
    """A library that is linked statically.

    Attributes:
        package: Debian's source package.
        archive: upstream's, which that has.
        sha256: of the archive.
        headers: the folder with its headers, or the only one.
        license: the text that has to go with a copy.
        build: makes the static library in the unpacked archive, and says where it is.
    """

    package: str
    archive: str
    sha256: str
    headers: str
    license: str
    build: Callable[[Path, Path], Path]


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **env}, check=True)


def unpack(archive: Path, folder: Path) -> Path:
    """The only folder that is in the archive, now in this one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run("tar", "-xf", archive, "-C", folder)
    (top,) = folder.iterdir()
    return top


# ---- the libraries ----


def fetch(library: Library) -> Path:
    """Upstream's archive, by apt-get, which is given lists of its own: the system's stay as they are."""
    archive = WORK / "sources" / library.archive
    if not archive.exists():
        apt = WORK / "apt"
        for folder in (*(apt / name for name in ("lists/partial", "cache/archives/partial", "parts")), archive.parent):
            folder.mkdir(parents=True, exist_ok=True)
        installed = platform.freedesktop_os_release().get("VERSION_CODENAME", SUITE)
        listed = [path.read_text() for path in Path("/etc/apt/sources.list.d").glob("*.sources")]
        sources = re.sub(r"^Types:.*$", "Types: deb-src", "\n\n".join(listed), flags=re.MULTILINE)
        (apt / "parts" / "all.sources").write_text(re.sub(rf"\b{installed}\b", SUITE, sources))
        options = (
            "Etc::sourcelist=-",
            f"Etc::sourceparts={apt}/parts",
            f"State::lists={apt}/lists",
            f"Cache={apt}/cache",
        )
        command = ["apt-get", "-qq", *(f"-oDir::{option}" for option in options), "-oAPT::Sandbox::User=root"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # all that counts is the archive
            run(*command, "update")
            run(*command, "source", "--download-only", library.package, cwd=archive.parent)
    if not archive.exists():
        sys.exit(f"{archive} could not be fetched. Where there is no Debian, put it there first.")
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


def build_liburing(source: Path, cc: Path) -> Path:
    """With libc, without which not every compiler finds its headers."""
    run("./configure", f"--cc={cc}", "--use-libc", cwd=source)
    tools = (f"CC={cc}", f"AR={cc.with_name('ar')}", f"CFLAGS={FLAGS}")
    run("make", "-s", "-C", "src", "liburing.a", *tools, cwd=source)
    return source / "src" / "liburing.a"


def build_libdeflate(source: Path, cc: Path) -> Path:
    """File by file: its own way is CMake, which would only be needed for this."""
    for path in sorted([*source.glob("lib/*.c"), *source.glob("lib/*/*.c")]):
        name = path.relative_to(source)
        run(cc, *FLAGS.split(), "-c", "-o", "-".join(name.with_suffix(".o").parts), name, cwd=source)
    run(cc.with_name("ar"), "rcs", "libdeflate.a", *sorted(source.glob("*.o")), cwd=source)
    return source / "libdeflate.a"


LIBRARIES = (
    Library(
        "liburing",
        "liburing_2.9.orig.tar.gz",
        "57e9b36e4ac1e46b8e0351dfb1694dc59638fc25e384b4ba36d87b800b16db1a",
        "src/include",
        "LICENSE",
        build_liburing,
    ),
    Library(
        "libdeflate",
        "libdeflate_1.23.orig.tar.gz",
        "1ab18349b9fb0ce8a0ca4116bded725be7dcbfa709e19f6f983d99df1fb8b25f",
        "libdeflate.h",
        "COPYING",
        build_libdeflate,
    ),
)


def build_libraries(folder: Path, cc: Path) -> None:
    """lib/*.a, include/ and licenses/ of all."""
    for name in ("include", "lib", "licenses"):
        (folder / name).mkdir()
    for library in LIBRARIES:
        source = unpack(fetch(library), folder / library.package)
        shutil.copy(library.build(source, cc), folder / "lib")
        headers = source / library.headers
        if headers.is_dir():
            shutil.copytree(headers, folder / "include", dirs_exist_ok=True)
        else:
            shutil.copy(headers, folder / "include")
        shutil.copy(source / library.license, folder / "licenses" / f"LICENSE.{library.package}")


def check_headers(folder: Path, cc: Path, architecture: str) -> None:
    """Python's headers are those of this machine; the sizes that they state must be true for the other one too.

    Debian's pyconfig.h includes one that lies in a folder of the architecture's: that serves both.
    """
    header = Path(sysconfig.get_config_h_filename())
    own = header.parents[1] / str(sysconfig.get_config_var("MULTIARCH")) / header.parent.name / header.name
    copy = folder / "include" / f"{architecture}-linux-gnu" / header.parent.name / header.name
    copy.parent.mkdir(parents=True)
    shutil.copy(own if own.exists() else header, copy)
    types = {"VOID_P": "void *", "_BOOL": "_Bool"}
    lines = [f"#include <{name}.h>" for name in ("pthread", "stdint", "stdio", "sys/types", "time", "wchar")]
    for name, size in re.findall(r"^#define SIZEOF_(\w+) (\d+)", copy.read_text(), re.MULTILINE):
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
    check_headers(folder, cc, architecture)
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
