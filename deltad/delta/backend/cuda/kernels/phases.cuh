// What every kernel of deltad is made of.
//
// The discipline. A kernel is a list of PHASES. A phase is a device function of (where am I, the block's shared
// memory, the arguments); between two phases stands a barrier of the block, and nowhere else. So:
//
//   - no register lives across a barrier: what a later phase needs is in shared or global memory;
//   - within a phase, threads of a block do not read what another one writes, but through integer atomics whose
//     result does not depend on their order (sums modulo 2^n, bitwise or);
//   - blocks of a launch do not wait for each other; they meet in the same atomics, or in the next launch;
//   - nothing counts on the width of a warp, or on its threads going in step.
//
// Why. A kernel that keeps these rules has one meaning however its threads are scheduled, and it can be run without a
// GPU: the host build below walks over blocks and threads, phase by phase, in any order that it is asked for. The
// tests run all of this very source that way, against the vectors of the format and the reference, forwards and
// backwards, and under the address sanitizer. What the barriers cost is nothing beside the memory that is read.
//
// No header is included, so that NVRTC needs none.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef DELTAD_HOST
#define DEVICE inline
#else
#define DEVICE __device__ __forceinline__
#endif

constexpr u32 THREADS = 256;  // of every block of every kernel
constexpr u32 GROUP = 16;     // neighbours that one thread adds up
constexpr u32 GROUPS = THREADS / GROUP;

struct Thread {
    u32 block, index;
};

// --- Atomics, in shared and in global memory. Their results are never read within the launch.

template <class T>
DEVICE void add_to(T* at, T value) {
#ifdef DELTAD_HOST
    *at += value;
#else
    atomicAdd(at, value);
#endif
}

DEVICE void or_into(u32* at, u32 value) {
#ifdef DELTAD_HOST
    *at |= value;
#else
    atomicOr(at, value);
#endif
}

DEVICE u32 ones(u32 mask) {
#ifdef DELTAD_HOST
    return u32(__builtin_popcount(mask));
#else
    return u32(__popc(mask));
#endif
}

// Bits up to the highest one; 0 for 0.
DEVICE u32 bit_length(u64 number) {
#ifdef DELTAD_HOST
    return number ? 64 - u32(__builtin_clzll(number)) : 0;
#else
    return 64 - u32(__clzll(static_cast<long long>(number)));
#endif
}

template <class T>
DEVICE T least(T a, T b) {
    return a < b ? a : b;
}

// --- Running sums over the threads of a block. Four phases use it, with a barrier after each of the first three:
// every thread `put`s its value; the first GROUPS threads `add_group`; the first thread `add_groups`; then any
// thread may ask for the sum `before` one, and for the `total`. T is any type with `+=`, zero when it is `T{}`.

template <class T>
struct RunningSum {
    T within[GROUPS * (GROUP + 1)];  // one entry to spare in each group: threads that walk groups meet other banks
    T groups[GROUPS + 1];

    static DEVICE u32 slot(u32 thread) { return thread + thread / GROUP; }

    DEVICE void put(u32 thread, T value) { within[slot(thread)] = value; }

    DEVICE void add_group(u32 group) {
        T sum{};
        for (u32 i = 0; i < GROUP; i++) {
            T* entry = &within[group * (GROUP + 1) + i];
            const T value = *entry;
            *entry = sum;
            sum += value;
        }
        groups[group] = sum;
    }

    DEVICE void add_groups() {
        T sum{};
        for (u32 i = 0; i < GROUPS; i++) {
            const T value = groups[i];
            groups[i] = sum;
            sum += value;
        }
        groups[GROUPS] = sum;
    }

    DEVICE T before(u32 thread) const {
        T sum = groups[thread / GROUP];
        sum += within[slot(thread)];
        return sum;
    }

    DEVICE T total() const { return groups[GROUPS]; }
};

// --- From phases to kernels. KERNEL(name, shared, arguments, phases...) is a line of the table in `deltad.cu`.
// Arguments are words of eight bytes, so that their layout is plain to whoever launches.

template <class Shared, class Arguments>
using Phase = void (*)(Thread, Shared&, const Arguments&);

#ifdef DELTAD_HOST

enum Order : u64 { FORWARDS, BACKWARDS, SCATTERED };

template <class Shared, class Arguments, Phase<Shared, Arguments> phase>
void run_threads(u32 block, Shared& shared, const Arguments& arguments, u64 order) {
    const u32 stride = order == FORWARDS ? 1 : order == BACKWARDS ? THREADS - 1 : 77;  // odd: all threads, once each
    const u32 first = order == FORWARDS ? 0 : THREADS - 1;
    for (u32 i = 0; i < THREADS; i++) phase(Thread{block, (first + i * stride) % THREADS}, shared, arguments);
}

template <class Shared, class Arguments, Phase<Shared, Arguments>... phases>
void run_blocks(u64 blocks, const Arguments& arguments, u64 order) {
    Shared* shared = static_cast<Shared*>(__builtin_malloc(sizeof(Shared)));
    for (u64 i = 0; i < blocks; i++) {
        const u32 block = u32(order == FORWARDS ? i : blocks - 1 - i);
        __builtin_memset(shared, 0xA5, sizeof(Shared));  // as shared memory is: of any content
        (run_threads<Shared, Arguments, phases>(block, *shared, arguments, order), ...);
    }
    __builtin_free(shared);
}

#define KERNEL(name, Shared, Arguments, ...)                                                                        \
    static_assert(sizeof(Arguments) % 8 == 0 && alignof(Arguments) == 8, "arguments are words of eight bytes");     \
    extern "C" void name(u64 blocks, const void* words, u64 size, u64 order) {                                      \
        if (size != sizeof(Arguments)) __builtin_trap();                                                            \
        run_blocks<Shared, Arguments, __VA_ARGS__>(blocks, *static_cast<const Arguments*>(words), order);           \
    }

#else

template <class Shared, class Arguments, Phase<Shared, Arguments>... phases>
DEVICE void run_phases(Thread me, Shared& shared, const Arguments& arguments) {
    ((phases(me, shared, arguments), __syncthreads()), ...);
}

#define KERNEL(name, Shared, Arguments, ...)                                                                        \
    static_assert(sizeof(Arguments) % 8 == 0 && alignof(Arguments) == 8, "arguments are words of eight bytes");     \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const Arguments arguments) {                         \
        __shared__ Shared shared;                                                                                   \
        run_phases<Shared, Arguments, __VA_ARGS__>(Thread{blockIdx.x, threadIdx.x}, shared, arguments);              \
    }

#endif
