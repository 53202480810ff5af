/* Lets chosen allocations of tensors fail: torch's allocator on CPU (in libc10.so) calls posix_memalign, and so this one
   when it is loaded with LD_PRELOAD. Between arm and disarm its calls are counted, and some of them fail.

   oneDNN calls it too, for small objects of its own. When one of those fails it does not look, and the process ends with
   a segmentation fault, which nobody can catch; so those are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int (*allocate_t)(void **, size_t, size_t);

static allocate_t allocate;
static atomic_int armed;
static atomic_long count, failed;
static long first, second, all_from;
static size_t at_least;
static uintptr_t torch_begin, torch_end;

__attribute__((constructor)) static void find_the_real_one(void) {
    allocate = (allocate_t)dlsym(RTLD_NEXT, "posix_memalign");
}

static int look_for_torch(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size, (void)data;
    if (!strstr(info->dlpi_name, "libc10.so")) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X)) {
            torch_begin = info->dlpi_addr + part->p_vaddr;
            torch_end = torch_begin + part->p_memsz;
        }
    }
    return 1;
}

static int is_torch(uintptr_t caller) { return caller >= torch_begin && caller < torch_end; }

static int is_to_fail(size_t size) {
    long number = atomic_fetch_add(&count, 1) + 1;
    if (number == first || number == second) return 1;
    return all_from > 0 && number >= all_from && size >= at_least;
}

int posix_memalign(void **result, size_t alignment, size_t size) {
    if (!allocate) find_the_real_one();
    if (atomic_load(&armed) && is_torch((uintptr_t)__builtin_return_address(0)) && is_to_fail(size)) {
        atomic_fetch_add(&failed, 1);
        return ENOMEM;
    }
    return allocate(result, alignment, size);
}

/* Numbers count from 1; 0 is none. From number from on, all of at least smallest bytes fail. */
void failures_arm(long number, long other, long from, long smallest) {
    if (!torch_begin) dl_iterate_phdr(look_for_torch, NULL);
    first = number;
    second = other;
    all_from = from;
    at_least = (size_t)smallest;
    atomic_store(&count, 0);
    atomic_store(&failed, 0);
    atomic_store(&armed, 1);
}

void failures_disarm(void) { atomic_store(&armed, 0); }
long failures_count(void) { return atomic_load(&count); }
long failures_failed(void) { return atomic_load(&failed); }
