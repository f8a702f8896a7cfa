/* threads.c: idle threads of the OpenMP loops sleep instead of spinning.
 *
 * libgomp spins for milliseconds by default, which on a machine with anything else to do makes a
 * training step several times slower; sleeping costs a few per cent on an idle one.  libgomp reads
 * its environment in a constructor; it is linked statically, so that this earlier one can speak
 * first.  A user's OMP_WAIT_POLICY or GOMP_SPINCOUNT stands. */
#include <stdlib.h>

__attribute__((constructor(101))) static void sleep_when_idle(void) {
    if (!getenv("GOMP_SPINCOUNT")) setenv("OMP_WAIT_POLICY", "passive", 0);
}
