# The folder of `make dist` runs where no library is installed; `make install` and uninstall leave
# nothing behind.
set -eu
make --no-print-directory dist
cp -r "$(dirname "$PGRUN")/dist/pgrun" "$SCRATCH/elsewhere"
cd "$SCRATCH"
test "$(env -i elsewhere/pgrun -e 'print(1 + 1)')" = 2
ldd elsewhere/pgrun
if ldd elsewhere/pgrun | grep -vE 'elsewhere|linux-vdso|ld-linux|lib(c|m)\.so'; then
    echo "these libraries are not in the folder"
    exit 1
fi
cd - >/dev/null
make --no-print-directory install DESTDIR="$SCRATCH/root" PREFIX=/usr
test "$("$SCRATCH/root/usr/bin/pgrun" -e 'print(1 + 1)')" = 2
make --no-print-directory uninstall DESTDIR="$SCRATCH/root" PREFIX=/usr
test -z "$(find "$SCRATCH/root" -type f)"
