// cudaprobe calls cuInit of the libcuda.so.1 that the dynamic loader finds, and prints
// the number that it returned: 805 where an MPS control daemon answered and no server
// came up, 100 where the library found no daemon and fell back to a machine without a
// GPU. cuInit is asked once per process, since its answer is kept; with --every
// MILLISECONDS the program asks again in a child of its own, for ever, a line each time.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int ask(void) {
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	if (!lib) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	int (*cuInit)(unsigned) = (int (*)(unsigned))dlsym(lib, "cuInit");
	if (!cuInit) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	printf("%d\n", cuInit(0));
	return fflush(stdout) ? 1 : 0;
}

int main(int argc, char **argv) {
	if (argc == 1)
		return ask();
	if (argc != 3 || strcmp(argv[1], "--every") != 0) {
		fprintf(stderr, "usage: cudaprobe [--every MILLISECONDS]\n");
		return 2;
	}
	long ms = strtol(argv[2], NULL, 10);
	struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
	for (;;) {
		pid_t child = fork();
		if (child == 0)
			_exit(ask());
		if (child < 0 || waitpid(child, NULL, 0) < 0)
			return 1;
		nanosleep(&pause, NULL);
	}
}
