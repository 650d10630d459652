/* Events. The steer file holds the machine's Xids in order of a sequence number; a set remembers, for each
 * device registered with it, the last number that it has seen. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

struct registered {
	char uuid[UUID_SIZE];
	unsigned long long types, seen;
};

struct nvmlEventSet_st {
	struct nvmlEventSet_st *next;
	int watch; /* inotify on the steer files, or -1: then they are looked at now and then */
	int count;
	struct registered device[4 * MAX_GPUS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken before the machine's */
static struct nvmlEventSet_st *sets;

static bool ours(const struct nvmlEventSet_st *set)
{
	for (struct nvmlEventSet_st *s = sets; s; s = s->next)
		if (s == set)
			return true;
	return false;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	nvmlReturn_t r = enter("EventSetCreate", no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	struct nvmlEventSet_st *s = calloc(1, sizeof *s);
	if (!s)
		return NVML_ERROR_MEMORY;
	s->watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (s->watch >= 0 && inotify_add_watch(s->watch, machine_folder(), IN_MOVED_TO) < 0) {
		close(s->watch);
		s->watch = -1;
	}
	pthread_mutex_lock(&lock);
	s->next = sets;
	sets = s;
	pthread_mutex_unlock(&lock);
	set->handle = s;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	nvmlReturn_t r = enter("EventSetFree", no_device, NULL);
	if (r != NVML_SUCCESS)
		return r;
	r = NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&lock);
	for (struct nvmlEventSet_st **at = &sets; *at; at = &(*at)->next)
		if (*at == set.handle) {
			*at = set.handle->next;
			r = NVML_SUCCESS;
			break;
		}
	pthread_mutex_unlock(&lock);
	if (r == NVML_SUCCESS) {
		if (set.handle->watch >= 0)
			close(set.handle->watch);
		free(set.handle);
	}
	return r;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	struct gpu g;
	nvmlReturn_t r = enter("DeviceGetSupportedEventTypes", device, &g);
	if (r != NVML_SUCCESS)
		return r;
	if (!types)
		return NVML_ERROR_INVALID_ARGUMENT;
	*types = nvmlEventTypeXidCriticalError;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	struct gpu g;
	unsigned long long last = 0;
	nvmlReturn_t r = enter("DeviceRegisterEvents", device, &g);
	if (r != NVML_SUCCESS)
		return r;
	if (types & ~nvmlEventTypeXidCriticalError)
		return NVML_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&lock);
	const struct machine *m = machine_lock();
	if (m) {
		if (m->xids > 0)
			last = m->xid[m->xids - 1].seq;
		machine_unlock();
	}
	r = NVML_ERROR_INVALID_ARGUMENT;
	struct nvmlEventSet_st *s = set.handle;
	if (ours(s) && s->count < (int)(sizeof s->device / sizeof *s->device)) {
		int i = 0;
		while (i < s->count && strcmp(s->device[i].uuid, g.uuid))
			i++;
		if (i == s->count) {
			memcpy(s->device[i].uuid, g.uuid, UUID_SIZE);
			s->device[i].seen = last; /* what occurred before is not recorded */
			s->count++;
		}
		s->device[i].types |= types;
		r = NVML_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return r;
}

/* The oldest event that the set has not seen. NVML_ERROR_TIMEOUT: none yet. */
static nvmlReturn_t next_event(struct nvmlEventSet_st *s, nvmlEventData_t *data)
{
	nvmlReturn_t r = NVML_ERROR_TIMEOUT;
	char uuid[UUID_SIZE];
	unsigned long long code = 0;
	pthread_mutex_lock(&lock);
	if (!ours(s)) {
		pthread_mutex_unlock(&lock);
		return NVML_ERROR_INVALID_ARGUMENT;
	}
	const struct machine *m = machine_lock();
	for (int i = 0; m && i < m->xids && r == NVML_ERROR_TIMEOUT; i++)
		for (int j = 0; j < s->count; j++) {
			struct registered *d = &s->device[j];
			if (!(d->types & nvmlEventTypeXidCriticalError) || strcmp(d->uuid, m->xid[i].uuid) ||
			    m->xid[i].seq <= d->seen)
				continue;
			d->seen = m->xid[i].seq;
			memcpy(uuid, d->uuid, UUID_SIZE);
			code = m->xid[i].code;
			r = NVML_SUCCESS;
			break;
		}
	if (m && r == NVML_ERROR_TIMEOUT && machine_variant(m, "event-wait-fails-when-lost"))
		for (int j = 0; j < s->count; j++) {
			const struct gpu *g = machine_gpu(m, s->device[j].uuid);
			if (!g || g->lost)
				r = NVML_ERROR_GPU_IS_LOST;
		}
	if (m)
		machine_unlock();
	pthread_mutex_unlock(&lock);
	if (r == NVML_SUCCESS) {
		memset(data, 0, sizeof *data);
		data->device = handle_of(uuid);
		data->eventType = nvmlEventTypeXidCriticalError;
		data->eventData = code;
		data->gpuInstanceId = data->computeInstanceId = 0xFFFFFFFF;
	}
	return r;
}

/* Sleeps until a steer file was replaced, at most ms. A set that is freed meanwhile is the caller's mistake,
 * with NVML as here. */
static void wait_for_change(struct nvmlEventSet_st *s, unsigned ms)
{
	char drained[4096];
	struct pollfd p = {.fd = s->watch, .events = POLLIN};
	if (s->watch < 0)
		sleep_ms(ms < 50 ? ms : 50);
	else if (poll(&p, 1, ms) > 0)
		while (read(s->watch, drained, sizeof drained) > 0)
			;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	unsigned long long begin = now_ms();
	for (;;) {
		nvmlReturn_t r = enter("EventSetWait", no_device, NULL);
		if (r != NVML_SUCCESS)
			return r;
		if (!data)
			return NVML_ERROR_INVALID_ARGUMENT;
		r = next_event(set.handle, data);
		unsigned long long spent = now_ms() - begin;
		if (r != NVML_ERROR_TIMEOUT || spent >= timeoutms)
			return r;
		wait_for_change(set.handle, timeoutms - spent);
	}
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	return nvmlEventSetWait_v2(set, data, timeoutms);
}
