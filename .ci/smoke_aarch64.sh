#!/bin/bash
# Runs tests/smoke.py with the aarch64 wheel that is in dist/, on a processor that qemu-user emulates (which has no
# io_uring): Debian's Python for arm64, unpacked below build/ and not installed, and a torch whose wheel for
# aarch64 brings no CUDA. Some ten minutes and 2 GB the first time, two minutes afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/aarch64 python=$PWD/build/aarch64/venv/bin/python
wheels=(dist/dcpring-*_aarch64.whl)
[ -e "${wheels[0]}" ] || { echo "There is no wheel for aarch64 in dist/: run make wheels first."; exit 1; }

if [ ! -e "$work/root/usr/bin/python3" ]; then
    mkdir -p "$work"/{root,venv/bin,apt/lists/partial,apt/cache/archives/partial}
    : >"$work/apt/status" # nothing is installed, so that apt-get fetches libc too
    apt=(apt-get -qq -oDir::State::lists="$work/apt/lists" -oDir::State::status="$work/apt/status" -oDir::Cache="$work/apt/cache"
        -oAPT::Architecture=arm64 -oAPT::Architectures=arm64 -oAPT::Sandbox::User=root -oAPT::Install-Recommends=false)
    "${apt[@]}" update
    "${apt[@]}" -y --download-only install python3 python3-pip-whl libstdc++6 libgomp1
    for package in "$work"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$work/root"; done
fi

# A virtual environment whose interpreter is the emulator, so that commands and child processes start as anywhere.
mkdir -p "$work/venv/bin"
echo "home = $work/root/usr/bin" >"$work/venv/pyvenv.cfg"
printf '#!/bin/sh\nexec qemu-aarch64 -L "%s" -0 "$0" "%s" "$@"\n' "$work/root" "$work/root/usr/bin/python3" >"$python"
chmod +x "$python"
unset PYTHONPATH
pip=("$python" "$(echo "$work"/root/usr/share/python-wheels/pip-*.whl)/pip" --disable-pip-version-check install -q --no-cache-dir)
"${pip[@]}" torch==2.10.0 numpy tqdm
"${pip[@]}" --no-deps --force-reinstall "${wheels[@]}"
"$python" tests/smoke.py
