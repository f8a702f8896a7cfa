/* library_cudnn.c: libcudnn.so.9, opened at the first use.
 *
 * The library is half a gigabyte with its parts; a program that trains no attention in half
 * precision does without.  cuDNN opens its own parts by dlopen too, so they must lie in a folder
 * that the loader knows (an rpath of the plug-in's older kind, DT_RPATH, is enough). */
#include "attention_cudnn.h"

#include <dlfcn.h>

static cudnn_library library;

static int find(void *handle, const char *name, void *slot) {
    void *found = dlsym(handle, name);
    *(void **)slot = found;
    return found ? PG_OK : pg_fail(PG_EDEVICE, "cuDNN: %s is missing in libcudnn.so.9", name);
}

static int find_all(void *handle) {
    PG_TRY(find(handle, "cudnnGetVersion", &library.version));
    PG_TRY(find(handle, "cudnnCreate", &library.create));
    PG_TRY(find(handle, "cudnnSetStream", &library.set_stream));
    PG_TRY(find(handle, "cudnnGetErrorString", &library.error_string));
    PG_TRY(find(handle, "cudnnGetLastErrorString", &library.last_error));
    PG_TRY(find(handle, "cudnnBackendCreateDescriptor", &library.descriptor_new));
    PG_TRY(find(handle, "cudnnBackendDestroyDescriptor", &library.descriptor_free));
    PG_TRY(find(handle, "cudnnBackendSetAttribute", &library.set));
    PG_TRY(find(handle, "cudnnBackendGetAttribute", &library.get));
    PG_TRY(find(handle, "cudnnBackendFinalize", &library.finalize));
    return find(handle, "cudnnBackendExecute", &library.execute);
}

const cudnn_library *cudnn_open(void) {
    static int tried, found;
    static const char *missing = "not found";
    if (!tried) {
        tried = 1;
        void *handle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
        if (handle) found = find_all(handle) == PG_OK;
        if (handle && !found) missing = "too old";
    }
    if (found) return &library;
    pg_fail(PG_EDEVICE, "cuDNN: libcudnn.so.9 is %s", missing);
    return NULL;
}
