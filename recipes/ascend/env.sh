# Environment of FlexFloor on Ascend; source it in the shell that starts the run. Never run on an NPU.
# CANN first: ASCEND_HOME_PATH must stand (flexfloor doctor looks for it).
source "${ASCEND_TOOLKIT:-/usr/local/Ascend/ascend-toolkit}/set_env.sh"

export TASK_QUEUE_ENABLE=1          # graph capture rejects 2
export VLLM_USE_V2_MODEL_RUNNER=0   # the V1 runner
export HCCL_BUFFSIZE=200            # MB; MC2 divides it up: 80 are needed for batches of 64 (docs/ascend.md)
export HCCL_CONNECT_TIMEOUT=300     # seconds a member waits for the others when a communicator is made
export HCCL_EXEC_TIMEOUT=1800       # seconds before a lost member ends a collective; the watchdog is faster
export HCCL_IF_BASE_PORT="${HCCL_IF_BASE_PORT:-60000}"

# What must not stand:
unset ASCEND_LAUNCH_BLOCKING PYTORCH_NPU_ALLOC_CONF DYNAMIC_EPLB EXPERT_MAP_RECORD
unset VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_ASCEND_ENABLE_FLASHCOMM1
