/* The steer file: where it is, when it has changed, what it says. Its format is in doc.go. */
#define _GNU_SOURCE
#include "sim.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t found = PTHREAD_ONCE_INIT;
static char folder[PATH_MAX], path[PATH_MAX + 16];
static struct machine machine;
static struct stat loaded; /* of the file that machine was read from; st_ino 0: none yet */

/* The library lies in <machine>/lib, and nothing but its own place tells it which machine it is. */
static void find_folder(void)
{
	Dl_info info;
	char real[PATH_MAX];
	if (!dladdr((void *)find_folder, &info) || !realpath(info.dli_fname, real))
		return;
	for (int up = 0; up < 2; up++) {
		char *slash = strrchr(real, '/');
		if (!slash)
			return;
		*slash = 0;
	}
	snprintf(folder, sizeof folder, "%.*s/sim", PATH_MAX - 8, real);
	snprintf(path, sizeof path, "%s/machine", folder);
}

const char *machine_folder(void)
{
	pthread_once(&found, find_folder);
	return folder;
}

static void copy_word(char *to, size_t size, const char *from)
{
	snprintf(to, size, "%s", from);
}

static void set_gpu(struct gpu *g, const char *key, const char *value)
{
	if (!strcmp(key, "minor"))
		g->minor = strtoul(value, NULL, 10);
	else if (!strcmp(key, "name"))
		copy_word(g->name, sizeof g->name, value);
	else if (!strcmp(key, "total"))
		g->total = strtoull(value, NULL, 10);
	else if (!strcmp(key, "reserved"))
		g->reserved = strtoull(value, NULL, 10);
	else if (!strcmp(key, "arch"))
		g->arch = atoi(value);
	else if (!strcmp(key, "cc"))
		sscanf(value, "%d.%d", &g->cc_major, &g->cc_minor);
	else if (!strcmp(key, "pci"))
		copy_word(g->pci, sizeof g->pci, value);
	else if (!strcmp(key, "pcidevice"))
		g->pci_device = strtoul(value, NULL, 0);
	else if (!strcmp(key, "numa"))
		g->numa = atoi(value);
	else if (!strcmp(key, "pcieswitch"))
		g->pcie_switch = atoi(value);
	else if (!strcmp(key, "mig"))
		g->mig = atoi(value);
	else if (!strcmp(key, "virtualization"))
		g->virtualization = atoi(value);
	else if (!strcmp(key, "ecc"))
		g->ecc = atoi(value);
	else if (!strcmp(key, "util"))
		sscanf(value, "%u %u", &g->gpu_percent, &g->memory_percent);
	else if (!strcmp(key, "lost"))
		g->lost = !strcmp(value, "1");
	else if (!strcmp(key, "nvlink") && g->links < MAX_LINKS) {
		char kind[16] = "", state[16] = "";
		struct link *l = &g->link[g->links];
		if (sscanf(value, "%31s %15s %15s", l->remote, kind, state) != 3)
			return;
		l->to_switch = !strcmp(kind, "switch");
		l->down = !strcmp(state, "down");
		g->links++;
	}
}

static void set(struct machine *m, const char *key, const char *value)
{
	if (!strcmp(key, "driver"))
		copy_word(m->driver, sizeof m->driver, value);
	else if (!strcmp(key, "nvml"))
		copy_word(m->nvml, sizeof m->nvml, value);
	else if (!strcmp(key, "cuda"))
		m->cuda = atoi(value);
	else if (!strcmp(key, "variant") && m->variants < MAX_VARIANTS)
		copy_word(m->variant[m->variants++], WORD_SIZE, value);
	else if ((!strcmp(key, "hang") || !strcmp(key, "fail")) && m->faults < MAX_FAULTS) {
		struct fault *f = &m->fault[m->faults];
		char error[WORD_SIZE] = "";
		memset(f, 0, sizeof *f);
		f->hang = key[0] == 'h';
		int got = f->hang ? sscanf(value, "%63s %47s", f->call, f->uuid)
				  : sscanf(value, "%63s %63s %47s", f->call, error, f->uuid);
		if (got < (f->hang ? 1 : 2))
			return;
		f->error = error_by_name(error);
		m->faults++;
	} else if (!strcmp(key, "xid") && m->xids < MAX_XIDS) {
		struct xid *x = &m->xid[m->xids];
		if (sscanf(value, "%llu %47s %llu", &x->seq, x->uuid, &x->code) == 3)
			m->xids++;
	} else if (!strcmp(key, "gpu")) {
		if (m->gpus == MAX_GPUS)
			return;
		struct gpu *g = &m->gpu[m->gpus++];
		memset(g, 0, sizeof *g);
		copy_word(g->uuid, sizeof g->uuid, value);
		g->numa = g->mig = g->ecc = -1;
	} else if (m->gpus > 0)
		set_gpu(&m->gpu[m->gpus - 1], key, value);
}

static void parse(struct machine *m, FILE *f)
{
	char *line = NULL;
	size_t size = 0;
	ssize_t n;
	m->gpus = m->faults = m->xids = m->variants = 0;
	while ((n = getline(&line, &size, f)) >= 0) {
		while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == ' '))
			line[--n] = 0;
		char *key = line + strspn(line, " ");
		if (*key == 0 || *key == '#')
			continue;
		char *value = strchr(key, ' ');
		if (value) {
			*value++ = 0;
			value += strspn(value, " ");
		}
		set(m, key, value ? value : "");
	}
	free(line);
}

static bool same(const struct stat *a, const struct stat *b)
{
	return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size &&
	       a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

const struct machine *machine_lock(void)
{
	struct stat now;
	machine_folder();
	pthread_mutex_lock(&lock);
	/* A machine whose folder was removed stays as it was last seen, like a driver that outlives its files. */
	if (stat(path, &now) == 0 && !same(&now, &loaded)) {
		FILE *f = fopen(path, "re");
		if (f) {
			if (fstat(fileno(f), &loaded) == 0)
				parse(&machine, f);
			fclose(f);
		}
	}
	if (loaded.st_ino == 0) {
		pthread_mutex_unlock(&lock);
		return NULL;
	}
	return &machine;
}

void machine_unlock(void)
{
	pthread_mutex_unlock(&lock);
}

const struct gpu *machine_gpu(const struct machine *m, const char *uuid)
{
	for (int i = 0; i < m->gpus; i++)
		if (!strcmp(m->gpu[i].uuid, uuid))
			return &m->gpu[i];
	return NULL;
}

bool machine_variant(const struct machine *m, const char *name)
{
	for (int i = 0; i < m->variants; i++)
		if (!strcmp(m->variant[i], name))
			return true;
	return false;
}

void sleep_ms(unsigned ms)
{
	struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
	nanosleep(&t, NULL);
}

unsigned long long now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (unsigned long long)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}
