/* The way into the library: start and end, errors, handles, and the calls about the machine as a whole. */
#define _GNU_SOURCE
#include "sim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken inside the machine's */
static int inits;
static char at_init[MAX_GPUS][UUID_SIZE]; /* for the variant count-fixed-at-init */
static int at_init_count;

struct nvmlDevice_st {
	char uuid[UUID_SIZE];
};
static struct nvmlDevice_st handles[4 * MAX_GPUS];
static int handle_count;

static const struct {
	nvmlReturn_t code;
	const char *name, *text;
} errors[] = {
    {NVML_SUCCESS, "SUCCESS", "Success"},
    {NVML_ERROR_UNINITIALIZED, "UNINITIALIZED", "Uninitialized"},
    {NVML_ERROR_INVALID_ARGUMENT, "INVALID_ARGUMENT", "Invalid Argument"},
    {NVML_ERROR_NOT_SUPPORTED, "NOT_SUPPORTED", "Not Supported"},
    {NVML_ERROR_NO_PERMISSION, "NO_PERMISSION", "Insufficient Permissions"},
    {NVML_ERROR_ALREADY_INITIALIZED, "ALREADY_INITIALIZED", "Already Initialized"},
    {NVML_ERROR_NOT_FOUND, "NOT_FOUND", "Not Found"},
    {NVML_ERROR_INSUFFICIENT_SIZE, "INSUFFICIENT_SIZE", "Insufficient Size"},
    {NVML_ERROR_INSUFFICIENT_POWER, "INSUFFICIENT_POWER", "Insufficient External Power"},
    {NVML_ERROR_DRIVER_NOT_LOADED, "DRIVER_NOT_LOADED", "Driver Not Loaded"},
    {NVML_ERROR_TIMEOUT, "TIMEOUT", "Timeout"},
    {NVML_ERROR_IRQ_ISSUE, "IRQ_ISSUE", "Interrupt Request Issue"},
    {NVML_ERROR_LIBRARY_NOT_FOUND, "LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"},
    {NVML_ERROR_FUNCTION_NOT_FOUND, "FUNCTION_NOT_FOUND", "Function Not Found"},
    {NVML_ERROR_CORRUPTED_INFOROM, "CORRUPTED_INFOROM", "Corrupted infoROM"},
    {NVML_ERROR_GPU_IS_LOST, "GPU_IS_LOST", "GPU is lost"},
    {NVML_ERROR_RESET_REQUIRED, "RESET_REQUIRED", "GPU requires reset"},
    {NVML_ERROR_OPERATING_SYSTEM, "OPERATING_SYSTEM", "GPU access blocked by the operating system"},
    {NVML_ERROR_LIB_RM_VERSION_MISMATCH, "LIB_RM_VERSION_MISMATCH", "Driver/library version mismatch"},
    {NVML_ERROR_IN_USE, "IN_USE", "In use by another client"},
    {NVML_ERROR_MEMORY, "MEMORY", "Insufficient Memory"},
    {NVML_ERROR_NO_DATA, "NO_DATA", "No data"},
    {NVML_ERROR_INSUFFICIENT_RESOURCES, "INSUFFICIENT_RESOURCES", "Insufficient Resources"},
    {NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "ARGUMENT_VERSION_MISMATCH", "Argument version mismatch"},
    {NVML_ERROR_DEPRECATED, "DEPRECATED", "Deprecated"},
    {NVML_ERROR_NOT_READY, "NOT_READY", "Not Ready"},
    {NVML_ERROR_GPU_NOT_FOUND, "GPU_NOT_FOUND", "GPU not found"},
    {NVML_ERROR_INVALID_STATE, "INVALID_STATE", "Invalid state"},
};

nvmlReturn_t error_by_name(const char *name)
{
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (!strcmp(errors[i].name, name))
			return errors[i].code;
	return NVML_ERROR_UNKNOWN;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == result)
			return errors[i].text;
	return "Unknown Error";
}

nvmlDevice_t handle_of(const char *uuid)
{
	nvmlDevice_t d = {NULL};
	pthread_mutex_lock(&lock);
	for (int i = 0; i < handle_count && !d.handle; i++)
		if (!strcmp(handles[i].uuid, uuid))
			d.handle = &handles[i];
	if (!d.handle && handle_count < (int)(sizeof handles / sizeof *handles)) {
		d.handle = &handles[handle_count++];
		snprintf(d.handle->uuid, UUID_SIZE, "%s", uuid);
	}
	pthread_mutex_unlock(&lock);
	return d;
}

const char *uuid_of(nvmlDevice_t device)
{
	const char *uuid = NULL;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < handle_count; i++)
		if (device.handle == &handles[i])
			uuid = handles[i].uuid; /* never changes once written */
	pthread_mutex_unlock(&lock);
	return uuid;
}

static bool initialized(void)
{
	pthread_mutex_lock(&lock);
	bool yes = inits > 0;
	pthread_mutex_unlock(&lock);
	return yes;
}

/* The first fault of the steer file that concerns this call, or NULL. */
static const struct fault *fault_of(const struct machine *m, const char *call, const char *uuid)
{
	for (int i = 0; i < m->faults; i++) {
		const struct fault *f = &m->fault[i];
		if (strcmp(f->call, "*") && strcmp(f->call, call))
			continue;
		if (!f->uuid[0] || (uuid && !strcmp(f->uuid, uuid)))
			return f;
	}
	return NULL;
}

#define HANG ((nvmlReturn_t)-1) /* not one of NVML's */

static bool keeps_handle(const struct machine *m, const char *call)
{
	return !strncmp(call, "DeviceGetHandleBy", 17) && machine_variant(m, "lost-gpu-keeps-handle");
}

/* One look at the steer file: HANG is "wait, and look again". */
static nvmlReturn_t look(const char *call, const char *uuid, struct gpu *g)
{
	const struct machine *m = machine_lock();
	nvmlReturn_t r = NVML_SUCCESS;
	if (!m)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	const struct fault *f = fault_of(m, call, uuid);
	const struct gpu *of = uuid ? machine_gpu(m, uuid) : NULL;
	if (f && f->hang)
		r = HANG;
	else if (uuid && (!of || of->lost) && !keeps_handle(m, call))
		r = of && machine_variant(m, "lost-gpu-hangs") ? HANG : NVML_ERROR_GPU_IS_LOST;
	else if (f)
		r = f->error;
	else if (of && g)
		*g = *of;
	machine_unlock();
	return r;
}

static nvmlReturn_t wait_and_look(const char *call, const char *uuid, struct gpu *g)
{
	nvmlReturn_t r;
	while ((r = look(call, uuid, g)) == HANG)
		sleep_ms(10);
	return r;
}

nvmlReturn_t enter(const char *call, nvmlDevice_t device, struct gpu *g)
{
	const char *uuid = NULL;
	if (!initialized())
		return NVML_ERROR_UNINITIALIZED;
	if (g) {
		uuid = uuid_of(device);
		if (!uuid)
			return NVML_ERROR_INVALID_ARGUMENT;
	}
	return wait_and_look(call, uuid, g);
}

bool variant(const char *name)
{
	const struct machine *m = machine_lock();
	bool yes = m && machine_variant(m, name);
	if (m)
		machine_unlock();
	return yes;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	(void)flags;
	nvmlReturn_t r = wait_and_look("Init", NULL, NULL);
	if (r != NVML_SUCCESS)
		return r;
	const struct machine *m = machine_lock();
	if (!m)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	pthread_mutex_lock(&lock);
	if (inits++ == 0) {
		at_init_count = m->gpus;
		for (int i = 0; i < m->gpus; i++)
			memcpy(at_init[i], m->gpu[i].uuid, UUID_SIZE);
	}
	pthread_mutex_unlock(&lock);
	machine_unlock();
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void)
{
	nvmlReturn_t r = enter("Shutdown", no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	pthread_mutex_lock(&lock);
	if (inits > 0)
		inits--;
	pthread_mutex_unlock(&lock);
	return NVML_SUCCESS;
}

static nvmlReturn_t copy_text(char *to, unsigned size, const char *text)
{
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (size <= strlen(text))
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, text);
	return NVML_SUCCESS;
}

static nvmlReturn_t system_text(const char *call, char *to, unsigned size, size_t field)
{
	nvmlReturn_t r = enter(call, no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	const struct machine *m = machine_lock();
	if (!m)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	r = copy_text(to, size, (const char *)m + field);
	machine_unlock();
	return r;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	return system_text("SystemGetDriverVersion", version, length, offsetof(struct machine, driver));
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	return system_text("SystemGetNVMLVersion", version, length, offsetof(struct machine, nvml));
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	nvmlReturn_t r = enter("SystemGetCudaDriverVersion", no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	if (!version)
		return NVML_ERROR_INVALID_ARGUMENT;
	const struct machine *m = machine_lock();
	if (!m)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	*version = m->cuda;
	machine_unlock();
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	return nvmlSystemGetCudaDriverVersion(version);
}

/* The UUIDs in order of index, as this process may see them. */
static int list(char uuids[MAX_GPUS][UUID_SIZE])
{
	int n = 0;
	const struct machine *m = machine_lock();
	if (!m)
		return 0;
	if (machine_variant(m, "count-fixed-at-init")) {
		pthread_mutex_lock(&lock);
		n = at_init_count;
		memcpy(uuids, at_init, sizeof at_init);
		pthread_mutex_unlock(&lock);
	} else {
		bool hide = machine_variant(m, "lost-gpu-not-counted");
		for (int i = 0; i < m->gpus; i++)
			if (!m->gpu[i].lost || !hide)
				memcpy(uuids[n++], m->gpu[i].uuid, UUID_SIZE);
	}
	machine_unlock();
	return n;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	char uuids[MAX_GPUS][UUID_SIZE];
	nvmlReturn_t r = enter("DeviceGetCount", no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = list(uuids);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
	return nvmlDeviceGetCount_v2(count);
}

/* A handle for a device, once the call is let through for it. */
static nvmlReturn_t give(const char *call, const char *uuid, nvmlDevice_t *device)
{
	nvmlReturn_t r = wait_and_look(call, uuid, NULL);
	if (r == NVML_SUCCESS)
		*device = handle_of(uuid);
	return r;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	char uuids[MAX_GPUS][UUID_SIZE];
	nvmlReturn_t r = enter("DeviceGetHandleByIndex", no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	if (!device || index >= (unsigned)list(uuids))
		return NVML_ERROR_INVALID_ARGUMENT;
	return give("DeviceGetHandleByIndex", uuids[index], device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	char uuids[MAX_GPUS][UUID_SIZE];
	nvmlReturn_t r = enter("DeviceGetHandleByUUID", no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	if (!uuid || !device)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0, n = list(uuids); i < n; i++)
		if (!strcmp(uuids[i], uuid))
			return give("DeviceGetHandleByUUID", uuids[i], device);
	return NVML_ERROR_NOT_FOUND;
}

/* Bus ids are equal when their numbers are: 0000:18:00.0 is 00000000:18:00.0. */
static bool same_bus(const char *a, const char *b)
{
	unsigned x[4], y[4];
	return sscanf(a, "%x:%x:%x.%x", &x[0], &x[1], &x[2], &x[3]) == 4 &&
	       sscanf(b, "%x:%x:%x.%x", &y[0], &y[1], &y[2], &y[3]) == 4 && !memcmp(x, y, sizeof x);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device)
{
	char uuid[UUID_SIZE] = "";
	nvmlReturn_t r = enter("DeviceGetHandleByPciBusId", no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	if (!bus || !device)
		return NVML_ERROR_INVALID_ARGUMENT;
	const struct machine *m = machine_lock();
	if (!m)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	for (int i = 0; i < m->gpus; i++)
		if (same_bus(m->gpu[i].pci, bus))
			memcpy(uuid, m->gpu[i].uuid, UUID_SIZE);
	machine_unlock();
	return uuid[0] ? give("DeviceGetHandleByPciBusId", uuid, device) : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *device)
{
	return nvmlDeviceGetHandleByPciBusId_v2(bus, device);
}
