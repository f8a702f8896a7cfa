#!/bin/sh
# demo_text.sh: an English text to train on, without a download site: Debian's package jargon-text
# (The Jargon File, public domain, 1.7 MB).  Prints the path of the unpacked text.
#
#   sh scripts/demo_text.sh [FOLDER]        writes FOLDER/demo/jargon.txt; FOLDER is build if not given
#
# An installed package is used as it is; otherwise the package is fetched and unpacked in FOLDER.
set -eu
folder=${1:-build}/demo
text=$folder/jargon.txt
inside=usr/share/doc/jargon-text/jargon.txt.gz
[ -s "$text" ] && { echo "$text"; exit 0; }
mkdir -p "$folder"

fetch() { (cd "$folder" && apt-get -q -o APT::Sandbox::User= download jargon-text) >"$folder/fetch.log" 2>&1; }

packed=/$inside
if [ ! -r "$packed" ]; then
    # A fresh container has no package lists; only root can fetch them.
    fetch || { [ "$(id -u)" = 0 ] && apt-get -q update >/dev/null 2>&1 && fetch; } || {
        tail -n 3 "$folder/fetch.log" >&2
        echo "demo_text: could not fetch the package jargon-text; try: sudo apt-get install jargon-text" >&2
        exit 1
    }
    dpkg-deb -x "$folder"/jargon-text_*.deb "$folder/package"
    packed=$folder/package/$inside
fi
gunzip -c "$packed" >"$text.part"
mv "$text.part" "$text" # whole or not at all
echo "$text"
