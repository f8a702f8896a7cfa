#!/bin/sh
# embed.sh FILE... > embed.c: each file's text inside the program, by the assembler's .incbin.
# runtime/host/script.c looks them up by path in pg_embedded[].
set -eu
root=$(pwd)
echo '/* made by scripts/embed.sh */'
echo '#include <stddef.h>'
echo 'typedef struct { const char *path, *start, *end; } pg_embedded_file;'
i=0
for file in "$@"; do
    printf '__asm__(".section .rodata\\npg_embed_%d:\\n.incbin \\"%s/%s\\"\\npg_embed_%d_end:\\n.byte 0\\n.previous\\n");\n' "$i" "$root" "$file" "$i"
    printf 'extern const char pg_embed_%d[], pg_embed_%d_end[];\n' "$i" "$i"
    i=$((i + 1))
done
echo 'extern const pg_embedded_file pg_embedded[];'
echo 'const pg_embedded_file pg_embedded[] = {'
i=0
for file in "$@"; do
    printf '    {"%s", pg_embed_%d, pg_embed_%d_end},\n' "$file" "$i" "$i"
    i=$((i + 1))
done
echo '    {NULL, NULL, NULL}};'
