# Makefile: builds pgrun and runs its tests.  `make help` lists the targets.
#   make V=1                          show whole commands
#   make test T=PATTERN               only tests whose name contains it;  PG_POOL=0: no cached blocks
#   make test DEVICE=cuda             the Lua tests and the ranks on GPUs
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

# libpg_cuda.so, where nvcc and the headers of cuBLASLt, cuDNN and NCCL are found (CUDA=0 leaves it
# out): all .cu and the .c files that include a header of CUDA; the rest it takes from pgrun.  cuDNN
# and NCCL are opened at run time, not linked.  CUDA_ARCH: machine code for these; PTX of 90 for
# later cards comes with it.  Where tests run without a GPU, one is enough.
NVCC      := $(or $(NVCC),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA_HOME := $(or $(CUDA_HOME),$(if $(NVCC),$(abspath $(dir $(realpath $(NVCC)))/..)))
CUDA_LIB  := $(or $(CUDA_LIB),$(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/targets/*/lib $(CUDA_HOME)/lib)))
CUDA_ARCH ?= $(if $(wildcard /dev/nvidiactl),80 90a,$(if $(filter test built check,$(MAKECMDGOALS)),90a,80 90a))
CUDA_C    := $(sort $(shell grep -lE '^.include [<"][^>"]*(cuda|cublas|cudnn|nccl)' runtime/*/*.c kernels/*.c))
CUDA_CU   := $(sort $(wildcard kernels/*.cu))
CUDA_OBJECTS := $(CUDA_C:%.c=$(BUILD)/cuda/%.o) $(CUDA_CU:%.cu=$(BUILD)/cuda/%.cu.o)
has_headers = $(shell printf '\043include <%s>\n' cuda_runtime.h cublasLt.h cudnn.h nccl.h | \
                $(CC) -E -isystem $(CUDA_HOME)/include - >/dev/null 2>&1 && echo yes)
PLUGIN    := $(if $(NVCC),$(if $(filter 0,$(CUDA))$(SAN),,$(if $(has_headers),$(BUILD)/libpg_cuda.so)))
NVCCFLAGS ?= -O3
NV_FLAGS   = $(NVCCFLAGS) -std=c++17 -isystem $(CUDA_HOME)/include -Xcompiler -fPIC,-Wall,-Wextra \
             $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
             -gencode arch=compute_90,code=compute_90 -MMD -MP

C_FILES := $(filter-out $(CUDA_C),$(sort $(wildcard runtime/*/*.c kernels/*.c)))
OBJECTS := $(C_FILES:%.c=$(BUILD)/%.o) $(BUILD)/embed.o
TESTS   := $(patsubst tests/c/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/c/test_*.c)))
LUA     := $(shell find lua models -name '*.lua' -o -path 'lua/*' \( -name '*.md' -o -name '*.svg' \) | LC_ALL=C sort)
C_ALL   := $(wildcard runtime/*.h runtime/*/*.[ch] kernels/*.[ch] tests/*.h tests/c/*.c)
# clang-format stays off pg.h, whose columns are set by hand, and the headers that are compiled for
# each number type: it takes N(name)(x) for a macro and a new line.
C_STYLE := $(filter-out runtime/pg.h %_typed.h %/typed_twice.h,$(C_ALL))
SOURCES  = $(C_ALL) $(LUA) $(wildcard scripts/*.* tests/*.lua tests/*/*.lua tests/*/*.sh)
BENCHES := $(wildcard tests/bench/*.lua)

all: $(BUILD)/pgrun $(PLUGIN)  ## build build/pgrun (the default), and build/libpg_cuda.so where CUDA is found
	$(if $(SAN),,@ln -sf $(BUILD)/pgrun pgrun)

$(BUILD)/pgrun: $(OBJECTS)
	$(call say,LINK,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) $(GOMP)

$(BUILD)/%.o: %.c Makefile
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) -c -o $@ $<

$(BUILD)/libpg_cuda.so: $(CUDA_OBJECTS)
	$(call say,LINK,$@)
	$(Q)$(CXX) -shared -static-libstdc++ -static-libgcc -Wl,-rpath,'$$ORIGIN',--disable-new-dtags -o $@ $^ \
	    -L$(CUDA_LIB) -lcublasLt -lcudart_static -lpthread -ldl -lrt

$(BUILD)/cuda/%.o: %.c Makefile
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) -fPIC -isystem $(CUDA_HOME)/include -c -o $@ $<

$(BUILD)/cuda/%.cu.o: %.cu Makefile
	$(call say,NVCC,$<)
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(NV_FLAGS) -c -o $@ $<

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

# nccl*.c with a fake of NCCL; its own test, since everything else of the plug-in needs a GPU.
ifneq ($(PLUGIN),)
$(BUILD)/tests/test_nccl: private FLAGS += -DPG_WITH_CUDA -isystem $(CUDA_HOME)/include
$(BUILD)/tests/test_nccl: $(patsubst %,$(BUILD)/cuda/runtime/backend/nccl%.o,_check _group _watch) \
                          $(BUILD)/cuda/runtime/backend/nccl.o tests/c/fake_nccl.h
endif

demo:  ## install what is missing, build, train models/tiny.lua, print what it writes
	@sh scripts/deps.sh
	@$(MAKE) all
	@sh scripts/demo_text.sh build
	$(BUILD)/pgrun models/tiny.lua

RUN_TESTS = BUILD=$(BUILD) SAN=$(SAN) DEVICE=$(DEVICE) $(BUILD)/pgrun tests/run.lua $(if $(T),'$(T)')
ifneq ($(findstring address,$(SAN)),)
# Each block of numbers is an allocation of its own, or overruns stay unseen.
export PG_POOL ?= 0
# LuaJIT keeps its objects out of LeakSanitizer's sight; tests/run.lua looks for leaks in the C tests.
export ASAN_OPTIONS := $(ASAN_OPTIONS):detect_leaks=0:allocator_may_return_null=1
endif
test:  ## install what is missing, build, run all tests
	@sh scripts/deps.sh
	@$(MAKE) built
	@$(RUN_TESTS)

matrix: $(BUILD)/pgrun  ## layouts and features combined at random: N=200 SEED=1, or ONLY='kind=six tp=3 ...'
	@mkdir -p $(BUILD)/tests/matrix
	@PGRUN=$(BUILD)/pgrun SCRATCH=$(BUILD)/tests/matrix PG_DEVICE=cpu PGRUN_TIMEOUT=60 \
	    $(BUILD)/pgrun tests/layouts/matrix.lua $(if $(ONLY),'$(ONLY)',$(or $(N),200) $(or $(SEED),1))

built: $(BUILD)/pgrun $(PLUGIN) $(TESTS)
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

# The target brings the driver, cuBLASLt and cuDNN of the same major version (half a GB each), and NCCL
# for several GPUs unless DIST_NCCL=1 takes it along; in the loader's path (or LD_LIBRARY_PATH).
DIST := $(BUILD)/dist/pgrun
dist: all  ## a folder build/dist/pgrun that runs on a machine with no package manager
	@rm -rf $(DIST) && mkdir -p $(DIST)
	@cp -r $(BUILD)/pgrun $(wildcard models README.md LICENSE) $(DIST)
	@ldd $(BUILD)/pgrun | awk '$$3 ~ /^\// && $$1 !~ /^lib(c|m|dl|pthread|rt)\.so/ { print $$3 }' | \
	    while read -r library; do cp -L "$$library" $(DIST); done
	@$(if $(PLUGIN),cp $(PLUGIN) $(DIST))
	@$(if $(DIST_NCCL),cp -L $(CUDA_LIB)/libnccl.so.2 $(DIST))
	@$(if $(DIST_TESTS),$(MAKE) dist-tests)
	@cd / && env -i $(abspath $(DIST))/pgrun -e 'print(1)' >/dev/null && du -sh $(abspath $(DIST))

# DIST_TESTS=1: what tests/device.sh and tests/bench need: the libraries of the C tests, the demo's text.
DEVICE_TESTS = $(filter %/test_cuda_memory %/test_nccl,$(TESTS)) $(filter $(BUILD)/tests/test_twins%,$(TESTS))
dist-tests: $(DEVICE_TESTS)
	@cp -r tests scripts lua $(DIST) && cp $(DEVICE_TESTS) $(DIST)/tests
	@mkdir -p $(DIST)/build/demo && text=$$(sh scripts/demo_text.sh $(BUILD)) && cp "$$text" $(DIST)/build/demo || echo "  dist: without the demo's text"
	@cp /usr/share/lua/5.1/luaunit.lua $(DIST)
	@ldd $(DEVICE_TESTS) | awk '$$1 ~ /^lib(openblas|cmocka|gomp|gfortran|quadmath)/ { print $$3 }' | sort -u | \
	    while read -r library; do cp -L "$$library" $(DIST); done
	@strip --strip-debug $(DIST)/pgrun $(DIST)/tests/test_*

install: $(BUILD)/pgrun $(PLUGIN)  ## PREFIX=/usr/local, DESTDIR=
	install -Dm755 $(BUILD)/pgrun $(DESTDIR)$(PREFIX)/bin/pgrun
	$(if $(PLUGIN),install -Dm755 $(PLUGIN) $(DESTDIR)$(PREFIX)/lib/pgrun/libpg_cuda.so)
uninstall:  ## take it away again
	rm -f $(DESTDIR)$(PREFIX)/bin/pgrun $(DESTDIR)$(PREFIX)/lib/pgrun/libpg_cuda.so

clean:  ## remove build/
	rm -rf build pgrun

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo '  benches:' $(patsubst tests/bench/%.lua,%,$(BENCHES))
	@sed -n '2,5s/^#/ /p' $(firstword $(MAKEFILE_LIST))

-include $(OBJECTS:.o=.d) $(TESTS:=.d) $(CUDA_OBJECTS:.o=.d)
.PHONY: all demo test matrix built valgrind check layers lint check-format format bench dist dist-tests install uninstall clean help
