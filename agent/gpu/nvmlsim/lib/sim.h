/* What the parts of the simulated NVML share: the machine as the steer file says it (steer.c),
 * what processes hold (processes.c), and the way into every call (enter). */
#ifndef NVMLSIM_SIM_H
#define NVMLSIM_SIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS 1
#pragma GCC visibility push(default)
#include "nvml.h"
#pragma GCC visibility pop

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The same limits as in spec.go. */
enum { MAX_GPUS = 64, MAX_LINKS = 18, MAX_FAULTS = 64, MAX_XIDS = 256, MAX_VARIANTS = 32 };
enum { UUID_SIZE = 48, WORD_SIZE = 64, NAME_SIZE = 96, PCI_SIZE = 32 };

struct link {
	char remote[PCI_SIZE];
	bool to_switch, down;
};

struct gpu {
	char uuid[UUID_SIZE];
	char name[NAME_SIZE];
	char pci[PCI_SIZE];
	unsigned minor;
	unsigned long long total, reserved; /* bytes */
	int arch, cc_major, cc_minor;
	unsigned pci_device;
	int numa, pcie_switch;
	int mig, virtualization, ecc; /* -1: not supported */
	unsigned gpu_percent, memory_percent;
	bool lost;
	int links;
	struct link link[MAX_LINKS];
};

struct fault {
	char call[WORD_SIZE];
	char uuid[UUID_SIZE]; /* "": every device */
	bool hang;
	nvmlReturn_t error;
};

struct xid {
	unsigned long long seq, code;
	char uuid[UUID_SIZE];
};

struct machine {
	char driver[80], nvml[80];
	int cuda;
	int gpus, faults, xids, variants;
	struct gpu gpu[MAX_GPUS];
	struct fault fault[MAX_FAULTS];
	struct xid xid[MAX_XIDS];
	char variant[MAX_VARIANTS][WORD_SIZE];
};

/* The machine, locked. machine_lock reads the steer file again when it has changed, and returns NULL,
 * unlocked, when there is none. */
const struct machine *machine_lock(void);
void machine_unlock(void);
const char *machine_folder(void); /* <machine>/sim */
const struct gpu *machine_gpu(const struct machine *m, const char *uuid);
bool machine_variant(const struct machine *m, const char *name);
nvmlReturn_t error_by_name(const char *name);

/* One thing that a process holds of a GPU. */
struct holding {
	unsigned pid;
	char uuid[UUID_SIZE];
	char kind; /* S: MPS server, M: MPS client, C: compute without MPS */
	unsigned long long bytes;
};

/* Copies what processes hold of a GPU: one entry for each pid and kind. Returns their number, at most max. */
int holdings_of(const char *uuid, struct holding *out, int max);

/* enter begins every call: it waits while the call is made to hang, and returns what it is made to fail with.
 * device is the device called on, or the null handle; its facts are copied to *g, and its variants can be asked
 * for with variant(). */
nvmlReturn_t enter(const char *call, nvmlDevice_t device, struct gpu *g);
bool variant(const char *name);
static const nvmlDevice_t no_device = {NULL};

/* Handles of devices stay good for the life of the process, also when the device goes. */
nvmlDevice_t handle_of(const char *uuid);
const char *uuid_of(nvmlDevice_t device); /* NULL: not one of ours */

void sleep_ms(unsigned ms);
unsigned long long now_ms(void); /* monotonic */

#endif
