# Makefile: builds pgrun and runs its tests.  `make help` lists the targets.
#   make V=1            show whole commands
#   make SAN=address,undefined test     everything under sanitizers, in a build folder of its own
BUILD   := build$(if $(SAN),/san-$(subst $(comma),-,$(SAN)))
comma   := ,
ARCH    := $(shell $(CC) -print-multiarch 2>/dev/null)
LIBDIR  := /usr/lib/$(ARCH)
BLAS    ?= $(LIBDIR)/openblas-openmp/libopenblas.a
LUAJIT  ?= $(LIBDIR)/libluajit-5.1.a
Q       := $(if $(V),,@)
say      = $(if $(V),,@printf '  %-6s %s\n' '$(1)' '$(2)')

CFLAGS  ?= -O3 -g1
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror
# No -ffast-math: isfinite() must keep its meaning.  Unwind tables: a Lua error may cross C frames.
FLAGS   := -std=gnu11 $(CFLAGS) $(WARN) -fopenmp -fno-math-errno -fno-trapping-math -fvisibility=default \
           -fasynchronous-unwind-tables -fno-omit-frame-pointer -MMD -MP \
           -isystem /usr/include/luajit-2.1 -isystem /usr/include/$(ARCH)/openblas-openmp \
           $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -DPG_SANITIZED)
LDFLAGS += -rdynamic -fopenmp $(if $(SAN),-fsanitize=$(SAN))
LIBS    := $(LUAJIT) $(BLAS) -ljansson -ledit -lpthread -ldl -lm

C_FILES := $(sort $(wildcard runtime/*/*.c kernels/*.c))
OBJECTS := $(C_FILES:%.c=$(BUILD)/%.o) $(BUILD)/embed.o
TESTS   := $(patsubst tests/c/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/c/test_*.c)))
LUA     := $(shell find lua models -name '*.lua' -o -path 'lua/*' -name '*.md' | LC_ALL=C sort)

all: $(BUILD)/pgrun  ## build build/pgrun (the default)
	@ln -sf $(BUILD)/pgrun pgrun 2>/dev/null || true

$(BUILD)/pgrun: $(OBJECTS)
	$(call say,LINK,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/%.o: %.c Makefile
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) -c -o $@ $<

# lua/, models/ and the text of pg.h inside the program
$(BUILD)/embed.c: scripts/embed.sh runtime/pg.h $(LUA)
	$(call say,EMBED,$@)
	@mkdir -p $(@D)
	$(Q)sh scripts/embed.sh runtime/pg.h $(LUA) > $@
$(BUILD)/embed.o: $(BUILD)/embed.c
	$(Q)$(CC) $(FLAGS) -c -o $@ $<

$(BUILD)/tests/%: tests/c/%.c $(filter-out %/host/main.o,$(OBJECTS)) tests/check.h
	$(call say,TEST,$@)
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) -Itests -o $@ $< $(filter %.o,$^) $(LDFLAGS) $(LIBS) -lcmocka

clean:  ## remove build/
	rm -rf build pgrun

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

-include $(OBJECTS:.o=.d)
.PHONY: all clean help
