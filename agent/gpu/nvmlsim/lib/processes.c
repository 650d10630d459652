/* What processes hold of the GPUs. The kernel is the ledger: a process that holds memory of a GPU has
 * a memfd named cuda:<uuid>:<kind> open, of that size. /proc is read once for all GPUs and the result serves
 * every call of the next moment. */
#define _GNU_SOURCE
#include "sim.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FRESH_MS = 50, MAX_HOLDINGS = 8192 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct holding *held;
static int held_count;
static unsigned long long scanned_ms;

/* A holding's memfd is a link that reads /memfd:cuda:GPU-...:K (deleted). */
static bool parse_link(const char *link, struct holding *h)
{
	static const char prefix[] = "/memfd:cuda:";
	if (strncmp(link, prefix, sizeof prefix - 1))
		return false;
	const char *uuid = link + sizeof prefix - 1;
	const char *colon = strchr(uuid, ':');
	if (!colon || (size_t)(colon - uuid) >= sizeof h->uuid || !strchr("SMC", colon[1]) || !colon[1])
		return false;
	memcpy(h->uuid, uuid, colon - uuid);
	h->uuid[colon - uuid] = 0;
	h->kind = colon[1];
	return true;
}

static void add(const struct holding *h)
{
	for (int i = held_count - 1; i >= 0 && held[i].pid == h->pid; i--)
		if (held[i].kind == h->kind && !strcmp(held[i].uuid, h->uuid)) {
			held[i].bytes += h->bytes;
			return;
		}
	if (held_count < MAX_HOLDINGS)
		held[held_count++] = *h;
}

static void scan_process(int proc, const char *pid)
{
	char name[64], link[128];
	snprintf(name, sizeof name, "%.16s/comm", pid);
	int fd = openat(proc, name, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	ssize_t n = read(fd, link, sizeof link - 1);
	close(fd);
	if (n <= 0)
		return;
	link[n] = 0;
	if (strncmp(link, "nvidia-cuda-mps", 15) && strncmp(link, "cuda-client", 11))
		return;
	/* A dead process in state Z has no open files, so it holds nothing. */
	snprintf(name, sizeof name, "%.16s/fd", pid);
	fd = openat(proc, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *fds = fd < 0 ? NULL : fdopendir(fd);
	if (!fds) {
		if (fd >= 0)
			close(fd);
		return;
	}
	for (struct dirent *e; (e = readdir(fds));) {
		struct holding h = {.pid = strtoul(pid, NULL, 10)};
		struct stat st;
		n = readlinkat(dirfd(fds), e->d_name, link, sizeof link - 1);
		if (n <= 0)
			continue;
		link[n] = 0;
		if (!parse_link(link, &h) || fstatat(dirfd(fds), e->d_name, &st, 0) < 0)
			continue;
		h.bytes = st.st_size;
		add(&h);
	}
	closedir(fds);
}

static void scan(void)
{
	held_count = 0;
	if (!held)
		held = calloc(MAX_HOLDINGS, sizeof *held);
	DIR *proc = opendir("/proc");
	if (!proc)
		return;
	for (struct dirent *e; held && (e = readdir(proc));)
		if (isdigit((unsigned char)e->d_name[0]))
			scan_process(dirfd(proc), e->d_name);
	closedir(proc);
}

int holdings_of(const char *uuid, struct holding *out, int max)
{
	int n = 0;
	pthread_mutex_lock(&lock);
	unsigned long long now = now_ms();
	if (!held || now - scanned_ms >= FRESH_MS) {
		scan();
		scanned_ms = now;
	}
	for (int i = 0; i < held_count && n < max; i++)
		if (!strcmp(held[i].uuid, uuid))
			out[n++] = held[i];
	pthread_mutex_unlock(&lock);
	return n;
}
