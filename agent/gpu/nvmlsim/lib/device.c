/* What a device is, what it holds and who uses it. */
#define _GNU_SOURCE
#include "sim.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_PROCESSES = 1024 };

/* Begins a call on a device: g is its facts, and a NULL where a result should go is refused, as NVML does. */
#define ENTER(call, device, result)                                                                                    \
	struct gpu g;                                                                                                  \
	nvmlReturn_t entered = enter(call, device, &g);                                                                \
	if (entered != NVML_SUCCESS)                                                                                   \
		return entered;                                                                                        \
	if (!(result))                                                                                                 \
	return NVML_ERROR_INVALID_ARGUMENT

static nvmlReturn_t copy_text(char *to, unsigned size, const char *text)
{
	if (size <= strlen(text))
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, text);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	ENTER("DeviceGetUUID", device, uuid);
	return copy_text(uuid, length, g.uuid);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	ENTER("DeviceGetName", device, name);
	return copy_text(name, length, g.name);
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
	ENTER("DeviceGetMinorNumber", device, minor);
	*minor = g.minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	ENTER("DeviceGetIndex", device, index);
	const struct machine *m = machine_lock();
	if (!m)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	const struct gpu *at = machine_gpu(m, g.uuid);
	if (at)
		*index = at - m->gpu;
	machine_unlock();
	return at ? NVML_SUCCESS : NVML_ERROR_GPU_IS_LOST;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	ENTER("DeviceGetCudaComputeCapability", device, major && minor);
	*major = g.cc_major;
	*minor = g.cc_minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
	ENTER("DeviceGetArchitecture", device, arch);
	*arch = g.arch;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	ENTER("DeviceGetMigMode", device, current && pending);
	if (g.mig < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*current = *pending = g.mig;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode)
{
	ENTER("DeviceGetVirtualizationMode", device, mode);
	if (g.virtualization < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*mode = (nvmlGpuVirtualizationMode_t)g.virtualization;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
	ENTER("DeviceGetEccMode", device, current && pending);
	if (g.ecc < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*current = *pending = g.ecc ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

/* Where it is. */

static void fill_pci(nvmlPciInfo_t *pci, const char *bus, unsigned device_id)
{
	unsigned domain = 0, number = 0, device = 0, function = 0;
	memset(pci, 0, sizeof *pci);
	sscanf(bus, "%x:%x:%x.%x", &domain, &number, &device, &function);
	pci->domain = domain;
	pci->bus = number;
	pci->device = device;
	pci->pciDeviceId = device_id;
	snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.%X", domain, number & 0xff, device & 0xff, function & 7);
	snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.%X", domain & 0xffff, number & 0xff,
		 device & 0xff, function & 7);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	ENTER("DeviceGetPciInfo", device, pci);
	fill_pci(pci, g.pci, g.pci_device);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	return nvmlDeviceGetPciInfo_v3(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	return nvmlDeviceGetPciInfo_v3(device, pci);
}

/* Only a platform whose GPUs are NUMA nodes themselves (Grace) has an answer, and none is simulated. */
nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
	ENTER("DeviceGetNumaNodeId", device, node);
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes,
					 nvmlAffinityScope_t scope)
{
	ENTER("DeviceGetMemoryAffinity", device, nodes && size > 0);
	const unsigned bits = sizeof *nodes * CHAR_BIT;
	if (scope != NVML_AFFINITY_SCOPE_NODE && scope != NVML_AFFINITY_SCOPE_SOCKET)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (g.numa < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	memset(nodes, 0, size * sizeof *nodes);
	if (g.numa / bits < size)
		nodes[g.numa / bits] = 1UL << g.numa % bits;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, nvmlGpuTopologyLevel_t *path)
{
	struct gpu h;
	ENTER("DeviceGetTopologyCommonAncestor", one, path);
	nvmlReturn_t r = enter("DeviceGetTopologyCommonAncestor", other, &h);
	if (r != NVML_SUCCESS)
		return r;
	if (g.numa != h.numa)
		*path = NVML_TOPOLOGY_SYSTEM;
	else
		*path = g.pcie_switch == h.pcie_switch ? NVML_TOPOLOGY_SINGLE : NVML_TOPOLOGY_NODE;
	return NVML_SUCCESS;
}

/* NVLink. A link that the device does not have is an invalid argument, and a device with none supports none. */

static nvmlReturn_t link_of(const struct gpu *g, unsigned link)
{
	if (g->links == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	return link < (unsigned)g->links ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active)
{
	ENTER("DeviceGetNvLinkState", device, active);
	nvmlReturn_t r = link_of(&g, link);
	if (r == NVML_SUCCESS)
		*active = g.link[link].down ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED;
	return r;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	ENTER("DeviceGetNvLinkRemotePciInfo", device, pci);
	nvmlReturn_t r = link_of(&g, link);
	if (r == NVML_SUCCESS)
		fill_pci(pci, g.link[link].remote, 0);
	return r;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type)
{
	ENTER("DeviceGetNvLinkRemoteDeviceType", device, type);
	nvmlReturn_t r = link_of(&g, link);
	if (r == NVML_SUCCESS)
		*type = g.link[link].to_switch ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
	return r;
}

/* The compute mode outlives every process that uses NVML, so it is a file of its own. */

static void mode_path(char *path, size_t size, const char *uuid, const char *end)
{
	snprintf(path, size, "%s/mode.%s%s", machine_folder(), uuid, end);
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
	char path[PATH_MAX + 128];
	int number = 0;
	ENTER("DeviceGetComputeMode", device, mode);
	if (g.mig > 0)
		return NVML_ERROR_NOT_SUPPORTED;
	mode_path(path, sizeof path, g.uuid, "");
	FILE *f = fopen(path, "re");
	if (f) {
		if (fscanf(f, "%d", &number) != 1)
			number = 0;
		fclose(f);
	}
	*mode = (nvmlComputeMode_t)number;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
	char path[PATH_MAX + 128], fresh[PATH_MAX + 160], end[32];
	ENTER("DeviceSetComputeMode", device, true);
	if (mode != NVML_COMPUTEMODE_DEFAULT && mode != NVML_COMPUTEMODE_PROHIBITED &&
	    mode != NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (geteuid() != 0)
		return NVML_ERROR_NO_PERMISSION;
	if (g.mig > 0)
		return NVML_ERROR_NOT_SUPPORTED;
	if (variant("compute-mode-does-not-stick"))
		return NVML_SUCCESS;
	snprintf(end, sizeof end, ".%d.%d", getpid(), gettid());
	mode_path(path, sizeof path, g.uuid, "");
	mode_path(fresh, sizeof fresh, g.uuid, end);
	FILE *f = fopen(fresh, "we");
	if (!f)
		return NVML_ERROR_UNKNOWN;
	bool written = fprintf(f, "%d", (int)mode) > 0;
	if (fclose(f) != 0 || !written || rename(fresh, path) != 0) {
		unlink(fresh);
		return NVML_ERROR_UNKNOWN;
	}
	return NVML_SUCCESS;
}

/* Memory, use and users. */

static unsigned long long allocated(const char *uuid, int *users)
{
	struct holding h[MAX_PROCESSES];
	unsigned long long bytes = 0;
	int n = holdings_of(uuid, h, MAX_PROCESSES);
	for (int i = 0; i < n; i++)
		bytes += h[i].bytes;
	if (users)
		*users = n;
	return bytes;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	ENTER("DeviceGetMemoryInfo_v2", device, memory);
	if (memory->version != nvmlMemory_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (variant("memory-v2-not-supported"))
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned long long used = allocated(g.uuid, NULL), room = g.total - g.reserved;
	memory->total = g.total;
	memory->reserved = g.reserved;
	memory->used = used < room ? used : room;
	memory->free = room - memory->used;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	ENTER("DeviceGetMemoryInfo", device, memory);
	unsigned long long used = allocated(g.uuid, NULL) + g.reserved;
	memory->total = g.total;
	memory->used = used < g.total ? used : g.total;
	memory->free = g.total - memory->used;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
	int users;
	ENTER("DeviceGetUtilizationRates", device, utilization);
	if (g.mig > 0)
		return NVML_ERROR_NOT_SUPPORTED;
	allocated(g.uuid, &users);
	utilization->gpu = users ? g.gpu_percent : 0;
	utilization->memory = users ? g.memory_percent : 0;
	return NVML_SUCCESS;
}

enum list { COMPUTE, MPS_COMPUTE };

static bool listed(char kind, enum list which, bool clients_too, bool clients_only_there)
{
	if (kind == 'M')
		return which == MPS_COMPUTE ? !clients_only_there : clients_too || clients_only_there;
	return which == COMPUTE;
}

/* Writes entries of v2's form; v1's is shorter, so entry_size says how far apart they lie. */
static nvmlReturn_t list_processes(const char *call, nvmlDevice_t device, unsigned *count, void *infos, size_t entry_size,
				   enum list which)
{
	struct holding h[MAX_PROCESSES];
	unsigned found = 0;
	ENTER(call, device, count && (infos || *count == 0));
	if (which == MPS_COMPUTE && g.cc_major < 7)
		return NVML_ERROR_NOT_SUPPORTED;
	bool too = variant("mps-clients-in-compute-list"), only = variant("mps-clients-only-in-compute-list");
	bool unknown = variant("process-memory-not-available");
	int n = holdings_of(g.uuid, h, MAX_PROCESSES);
	for (int i = 0; i < n; i++) {
		if (!listed(h[i].kind, which, too, only))
			continue;
		if (found < *count) {
			nvmlProcessInfo_v2_t p = {.pid = h[i].pid,
						  .usedGpuMemory = unknown ? (unsigned long long)NVML_VALUE_NOT_AVAILABLE : h[i].bytes,
						  .gpuInstanceId = 0xFFFFFFFF,
						  .computeInstanceId = 0xFFFFFFFF};
			memcpy((char *)infos + found * entry_size, &p, entry_size);
		}
		found++;
	}
	nvmlReturn_t r = found > *count ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
	*count = found;
	return r;
}

_Static_assert(offsetof(nvmlProcessInfo_v1_t, usedGpuMemory) == offsetof(nvmlProcessInfo_v2_t, usedGpuMemory),
	       "v1 begins as v2 does");

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v1_t *infos)
{
	return list_processes("DeviceGetComputeRunningProcesses", d, n, infos, sizeof *infos, COMPUTE);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v2_t *infos)
{
	return list_processes("DeviceGetComputeRunningProcesses", d, n, infos, sizeof *infos, COMPUTE);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *infos)
{
	return list_processes("DeviceGetComputeRunningProcesses", d, n, infos, sizeof *infos, COMPUTE);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v1_t *infos)
{
	return list_processes("DeviceGetMPSComputeRunningProcesses", d, n, infos, sizeof *infos, MPS_COMPUTE);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v2(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v2_t *infos)
{
	return list_processes("DeviceGetMPSComputeRunningProcesses", d, n, infos, sizeof *infos, MPS_COMPUTE);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *infos)
{
	return list_processes("DeviceGetMPSComputeRunningProcesses", d, n, infos, sizeof *infos, MPS_COMPUTE);
}
