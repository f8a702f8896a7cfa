# Makefile: builds pgrun and runs its tests.  `make help` lists the targets.
#   make V=1                          show whole commands
#   make test T=PATTERN               only tests whose name contains it;  PG_POOL=0: no cached blocks
#   make SAN=address,undefined test   everything under sanitizers, in a build folder of its own
comma   := ,
BUILD   := build$(if $(SAN),/san-$(subst $(comma),-,$(SAN)))
ARCH    := $(shell $(CC) -print-multiarch 2>/dev/null)
LIBDIR  := /usr/lib/$(ARCH)
BLAS    ?= $(LIBDIR)/openblas-openmp/libopenblas.a
LUAJIT  ?= $(LIBDIR)/libluajit-5.1.a
GOMP    := $(shell $(CC) -print-file-name=libgomp.a) # static: see runtime/host/threads.c
PREFIX  ?= /usr/local
Q       := $(if $(V),,@)
say      = $(if $(V),,@printf '  %-6s %s\n' '$(1)' '$(2)')
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc) --no-print-directory # a -j on the command line wins
endif

CFLAGS  ?= -O3 -g1
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror
# No -ffast-math: isfinite() must keep its meaning.  Unwind tables: a Lua error may cross C frames.
FLAGS   := -std=gnu11 -D_GNU_SOURCE= $(CFLAGS) $(WARN) -fopenmp -fno-math-errno -fno-trapping-math \
           -fvisibility=default -fasynchronous-unwind-tables -fno-omit-frame-pointer -MMD -MP \
           -isystem /usr/include/luajit-2.1 -isystem /usr/include/$(ARCH)/openblas-openmp \
           $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -DPG_SANITIZED)
# DT_RPATH, not RUNPATH: `make dist` puts libraries beside pgrun, and they need one another too.
LDFLAGS += -rdynamic -Wl,-rpath,'$$ORIGIN',--disable-new-dtags $(if $(SAN),-fsanitize=$(SAN))
LIBS    := $(LUAJIT) $(BLAS) -ljansson -ledit -lpthread -ldl -lm
# C tests take the same OpenBLAS as a shared library: 0.2 s and 0.6 MB a test where the static one
# costs 1.7 s and 26 MB.
TEST_BLAS := -L$(dir $(BLAS)) -Wl,-rpath,$(dir $(BLAS)) -lopenblas

C_FILES := $(sort $(wildcard runtime/*/*.c kernels/*.c))
OBJECTS := $(C_FILES:%.c=$(BUILD)/%.o) $(BUILD)/embed.o
TESTS   := $(patsubst tests/c/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/c/test_*.c)))
LUA     := $(shell find lua models -name '*.lua' -o -path 'lua/*' -name '*.md' | LC_ALL=C sort)
C_ALL   := $(wildcard runtime/*.h runtime/*/*.[ch] kernels/*.[ch] tests/*.h tests/c/*.c)
# clang-format stays off pg.h, whose columns are set by hand, and the headers that are compiled for
# each number type: it takes N(name)(x) for a macro and a new line.
C_STYLE := $(filter-out runtime/pg.h %_typed.h %/typed_twice.h,$(C_ALL))
SOURCES  = $(C_ALL) $(LUA) $(wildcard scripts/*.* tests/*.lua tests/*/*.lua tests/*/*.sh)
BENCHES := $(wildcard tests/bench/*.lua)

all: $(BUILD)/pgrun  ## build build/pgrun (the default)
	$(if $(SAN),,@ln -sf $(BUILD)/pgrun pgrun)

$(BUILD)/pgrun: $(OBJECTS)
	$(call say,LINK,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) $(GOMP)

$(BUILD)/%.o: %.c Makefile
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) -c -o $@ $<

# lua/, models/ and the text of pg.h inside the program.  The folders are named because taking a file
# away changes them alone.
$(BUILD)/embed.c: scripts/embed.sh runtime/pg.h $(LUA) $(sort $(dir $(LUA)))
	$(call say,EMBED,$@)
	@mkdir -p $(@D)
	$(Q)sh scripts/embed.sh runtime/pg.h $(LUA) > $@
$(BUILD)/embed.o: $(BUILD)/embed.c
	$(Q)$(CC) $(FLAGS) -c -o $@ $<

$(BUILD)/tests/%: tests/c/%.c $(filter-out %/host/main.o,$(OBJECTS)) tests/check.h Makefile
	$(call say,TEST,$@)
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) -Itests -o $@ $< $(filter %.o,$^) $(LDFLAGS) -fopenmp $(subst $(BLAS),$(TEST_BLAS),$(LIBS)) -lcmocka

demo:  ## install what is missing, build, train models/tiny.lua, print what it writes
	@sh scripts/deps.sh
	@$(MAKE) all
	@sh scripts/demo_text.sh build
	$(BUILD)/pgrun models/tiny.lua

RUN_TESTS = BUILD=$(BUILD) SAN=$(SAN) $(BUILD)/pgrun tests/run.lua $(if $(T),'$(T)')
ifneq ($(findstring address,$(SAN)),)
# Each block of numbers is an allocation of its own, or overruns stay unseen.
export PG_POOL ?= 0
# LuaJIT keeps its objects out of LeakSanitizer's sight; tests/run.lua looks for leaks in the C tests.
export ASAN_OPTIONS := $(ASAN_OPTIONS):detect_leaks=0
endif
test:  ## install what is missing, build, run all tests
	@sh scripts/deps.sh
	@$(MAKE) built
	@$(RUN_TESTS)

built: $(BUILD)/pgrun $(TESTS)
	@:
valgrind: built  ## the C tests under valgrind (slow)
	@UNDER='valgrind -q --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite' $(RUN_TESTS)

check:  ## all that must pass before a commit: layers, lint, format, tests
	@$(MAKE) layers
	@$(MAKE) lint
	@$(MAKE) check-format
	@$(MAKE) test

layers: $(BUILD)/pgrun  ## every #include and require points down the tower
	@$(BUILD)/pgrun scripts/check_layers.lua

lint:  ## luacheck, and no file over 500 lines (sh scripts/deps.sh lint brings the tools)
	@wc -l $(SOURCES) | awk '$$1 > 500 && $$2 != "total" { print $$2 ": " $$1 " lines, 500 at most"; bad = 1 } \
	    END { exit bad }'
	@if command -v luacheck >/dev/null; then luacheck -q --no-color lua models scripts tests; \
	 else echo 'lint: no luacheck here, Lua not read'; fi

check-format:
	@if command -v clang-format >/dev/null; then clang-format --dry-run -Werror $(C_STYLE); \
	 else echo 'format: no clang-format here, C not read'; fi
format:  ## clang-format over the C files
	clang-format -i $(C_STYLE)

bench: $(BUILD)/pgrun  ## run tests/bench/*.lua (T=PATTERN for some)
	@export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc)}; for file in $(BENCHES); do case $$file in *'$(T)'*) echo "== $$file"; \
	    ranks=$$(sed -n '1s/^-- ranks: *\([0-9]*\).*/-n \1/p' $$file); \
	    $(BUILD)/pgrun $$ranks $$file || exit 1;; esac; done

DIST := $(BUILD)/dist/pgrun
dist: all  ## a folder build/dist/pgrun that runs on a machine with no package manager
	@rm -rf $(DIST) && mkdir -p $(DIST)
	@cp -r $(BUILD)/pgrun $(wildcard models README.md LICENSE) $(DIST)
	@ldd $(BUILD)/pgrun | awk '$$3 ~ /^\// && $$1 !~ /^lib(c|m|dl|pthread|rt)\.so/ { print $$3 }' | \
	    while read -r library; do cp -L "$$library" $(DIST); done
	@cd / && env -i $(abspath $(DIST))/pgrun -e 'print(1)' >/dev/null && du -sh $(abspath $(DIST))

install: $(BUILD)/pgrun  ## PREFIX=/usr/local, DESTDIR=
	install -Dm755 $(BUILD)/pgrun $(DESTDIR)$(PREFIX)/bin/pgrun
uninstall:  ## take it away again
	rm -f $(DESTDIR)$(PREFIX)/bin/pgrun

clean:  ## remove build/
	rm -rf build pgrun

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo '  benches:' $(patsubst tests/bench/%.lua,%,$(BENCHES))
	@sed -n '2,4s/^#/ /p' $(firstword $(MAKEFILE_LIST))

-include $(OBJECTS:.o=.d) $(TESTS:=.d)
.PHONY: all demo test built valgrind check layers lint check-format format bench dist install uninstall clean help
