"""The figures that are asked for, by their names in Nsight Compute, and what they mean.

Names and meanings are those of NVIDIA's documentation (https://docs.nvidia.com/nsight-compute/ProfilingGuide, "Metrics
Reference" and "Statistical Sampler"; `ncu --query-metrics --chip gh100` lists the names). Shares of a peak are over all cycles
that a kernel takes ("elapsed"), but for issue slots and occupancy, which are over those in which a multiprocessor has work.
"""

TIME = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"

# Key -> the metric; percentages, to be averaged over launches by the time that each takes.
SHARES = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "matrix": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit": "sm__maximum_warps_per_active_cycle_pct",
}

# What the emulator counts, too: (transactions, requests) of warps, to be summed over launches.
PER_REQUEST = {
    "device memory read": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    ),
    "device memory written": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    ),
    "shared memory read": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "smsp__sass_inst_executed_op_shared_ld.sum",
    ),
    "shared memory written": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
        "smsp__sass_inst_executed_op_shared_st.sum",
    ),
}
TRANSACTIONS = {name: "sectors" if name.startswith("device") else "wavefronts" for name in PER_REQUEST}

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SELECTED = "selected"  # the warp issues: no stall, but a part of the cycles that all of them are shares of

# Why a warp that is resident does not issue an instruction in a cycle.
STALLS = {
    "barrier": "waits for the other warps at __syncthreads",
    "branch_resolving": "waits for a branch target",
    "dispatch_stall": "the dispatcher holds the instruction back",
    "drain": "waits for its stores at its end",
    "gmma": "waits for wgmma to be ready (Hopper)",
    "imc_miss": "waits for constant memory",
    "lg_throttle": "the queue of device-memory instructions is full",
    "long_scoreboard": "waits for a value from device memory or a cache",
    "math_pipe_throttle": "the arithmetic unit it needs is busy",
    "membar": "waits at a memory fence",
    "mio_throttle": "the queue of shared-memory and special instructions is full",
    "misc": "another reason of the hardware",
    "no_instruction": "waits for instructions to be fetched",
    "not_selected": "is ready, but another warp was chosen",
    "short_scoreboard": "waits for a value from shared memory or a special function",
    "sleeping": "sleeps (nanosleep)",
    "tex_throttle": "the queue of texture instructions is full",
    "wait": "waits a fixed number of cycles for its last instruction",
}

ALL = (
    TIME,
    REGISTERS,
    *SHARES.values(),
    *(metric for pair in PER_REQUEST.values() for metric in pair),
    *(STALL.format(reason) for reason in (*STALLS, SELECTED)),
)
