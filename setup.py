"""Builds the extension dcpring._C; everything else is in pyproject.toml.

liburing and libdeflate are linked statically where their archives are there (and usable in a shared object),
else dynamically. None of their symbols are exported. The wheels of a release are built by .ci/wheels.py.

DCPRING_CFLAGS adds compiler and linker flags (sanitizers, -Werror). Assertions are off (NDEBUG), as a wheel has them;
DCPRING_CFLAGS=-UNDEBUG turns them on, and that is how the tests are run. What only tests call (faults in system calls,
records of them) is in what is built in place, as by `pip install -e`, and else only where DCPRING_TEST=1 asks for it.

DCPRING_HOME, or what GitHub Actions says of itself, is the address of the repository: an index of packages then shows
it, and the links of README.md lead there.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.install_lib import install_lib

EXPORTS = "csrc/py/exports.map"
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes"]
LIBRARIES = {
    "uring": ("#include <liburing.h>", "struct io_uring r; return io_uring_queue_init(1, &r, 0);", "liburing-dev"),
    "deflate": ("#include <libdeflate.h>", 'return (int)libdeflate_crc32(0, "", 0);', "libdeflate-dev"),
}


TEST_SOURCES = {"csrc/py/test_hooks.c", "csrc/core/io/sys_fault.c", "csrc/core/io/sys_record.c"}

STARTUP = Path("python/dcpring_install.pth")
"""A line that Python reads when it starts, from the folder of packages: with DCPRING_INSTALL it imports dcpring."""


def home() -> str:
    """The address of the repository; "" where nothing says it."""
    server, name = os.environ.get("GITHUB_SERVER_URL", ""), os.environ.get("GITHUB_REPOSITORY", "")
    return os.environ.get("DCPRING_HOME", f"{server}/{name}" if server and name else "").rstrip("/")


def project_urls(address: str) -> dict[str, str]:
    pages = {"Documentation": "docs/howto/README.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    return {"Repository": address, **{title: f"{address}/blob/main/{page}" for title, page in pages.items()}}


def readme(address: str) -> str:
    """README.md; its relative links and pictures lead to the repository, if its address is known."""
    text = Path("README.md").read_text(encoding="utf-8")
    if not address:
        return text
    pictures = re.sub(r"(!\[[^]]*\]\()(?!https?://)", rf"\g<1>{address}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?://|#)", rf"\g<1>{address}/blob/main/", pictures)


def links(compiler: list[str], include: str, body: str, library: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(f"{include}\nint probe(void);\nint probe(void) {{ {body} }}\n")
        command = [*compiler, "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", f"{folder}/probe.so", str(source), *library]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def link_arguments(compiler: list[str]) -> list[str]:
    """The linker's arguments for both libraries; exits with the packages to install when one is missing."""
    arguments: list[str] = []
    missing: list[str] = []
    for name, (include, body, package) in LIBRARIES.items():
        found = subprocess.run(
            [*compiler, f"-print-file-name=lib{name}.a"], capture_output=True, text=True, check=False
        )
        archive = found.stdout.strip()
        if os.path.isabs(archive) and links(compiler, include, body, [archive]):
            arguments.append(archive)
        elif links(compiler, include, body, [f"-l{name}"]):
            arguments.append(f"-l{name}")
        else:
            missing.append(package)
    if missing:
        sys.exit(
            f"dcpring needs {' and '.join(missing)} to build. On Debian or Ubuntu: apt-get install {' '.join(missing)}"
            " (elsewhere: the development packages of liburing and libdeflate)."
        )
    return arguments


def refuse_free_threading() -> None:
    """The extension needs the stable ABI: setuptools and Python's headers would fail with errors of their own."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        version = "{}.{}".format(*sys.version_info)
        sys.exit(
            f"dcpring cannot be built for the free-threaded Python {version}t, which has no stable ABI. Use "
            f"the ordinary python{version}, with the GIL."
        )


class BuildExtension(build_ext):
    is_for_tests = False

    def run(self) -> None:
        self.is_for_tests = bool(self.inplace or self.editable_mode) or os.environ.get("DCPRING_TEST") == "1"
        super().run()  # in which `inplace` is off

    def build_extension(self, ext: Extension) -> None:
        if self.is_for_tests:
            ext.define_macros = [*ext.define_macros, ("DCPRING_TEST", None)]
        else:
            ext.sources = [path for path in ext.sources if path not in TEST_SOURCES]
        ext.extra_link_args = [*ext.extra_link_args, *link_arguments(self.compiler.compiler[:1])]
        super().build_extension(ext)


class LimitedApiWheel(bdist_wheel):
    def finalize_options(self) -> None:
        self.py_limited_api = "cp311"
        super().finalize_options()


class InstallLib(install_lib):
    def run(self) -> None:
        super().run()
        self.copy_file(str(STARTUP), self.install_dir)

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), os.path.join(self.install_dir, STARTUP.name)]


class EditableWheel(editable_wheel):
    """`pip install -e`: nothing is copied there, so the file is added to the wheel that was made."""

    def run(self) -> None:
        super().run()
        for path in Path(self.dist_dir).glob("*.editable-*.whl"):
            with zipfile.ZipFile(path) as wheel:
                entries = [(info, wheel.read(info)) for info in wheel.infolist()]
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
                wheel.write(STARTUP, STARTUP.name)
                for info, data in entries:
                    is_record = info.filename.endswith(".dist-info/RECORD")
                    wheel.writestr(info, data + f"{STARTUP.name},,\n".encode() if is_record else data)


refuse_free_threading()
extra = shlex.split(os.environ.get("DCPRING_CFLAGS", ""))
setup(
    long_description=readme(home()),
    long_description_content_type="text/markdown",
    project_urls=project_urls(home()) if home() else {},
    ext_modules=[
        Extension(
            "dcpring._C",
            sources=sorted(str(path) for path in Path("csrc").rglob("*.c")),
            depends=[EXPORTS, *sorted(str(path) for path in Path("csrc").rglob("*.h"))],
            include_dirs=["csrc/core", "csrc/py"],
            define_macros=[("_GNU_SOURCE", None), ("NDEBUG", None)],
            extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-pthread", *WARNINGS, *extra],
            extra_link_args=["-pthread", "-lm", f"-Wl,--version-script={EXPORTS}", *extra],
            py_limited_api=True,
        )
    ],
    cmdclass={
        "build_ext": BuildExtension,
        "bdist_wheel": LimitedApiWheel,
        "editable_wheel": EditableWheel,
        "install_lib": InstallLib,
    },
)
