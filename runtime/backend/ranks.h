/* ranks.h: which rank am I, of how many, as the environment tells it.
 *
 * Read in this order, the first that is there counts: RANK and WORLD_SIZE (pgrun's own launcher,
 * torchrun), OpenMPI, MPICH and Hydra, Slurm (only a step of more than one task, since an
 * interactive allocation sets its variables too). */
#ifndef PG_RANKS_H
#define PG_RANKS_H

typedef struct {
    int rank, size;             /* of all hosts */
    int local_rank, local_size; /* of this host */
    int served;         /* PG_STORE_SERVED: host 0's pgrun has the store (store.h), not rank 0 */
    int port;           /* MASTER_PORT, else one made of the job */
    char host[256];     /* MASTER_ADDR, else the first host of the job */
    char job[128];      /* tells two jobs of one user apart; may be "" */
    const char *source; /* "torchrun", "OpenMPI", "MPICH", "Slurm", or "" for a world of one */
} pg_ranks;

/* PG_EINVAL names the variable, its value and the rule. */
int pg_ranks_read(pg_ranks *out);
/* Ranks of this host, which share its memory; 1 where pg_ranks_read fails (joining tells why). */
int pg_ranks_here(void);
/* PGRUN_TIMEOUT: seconds that ranks wait for each other; 600 where it is unset. */
int pg_ranks_timeout(double *seconds);
#endif
