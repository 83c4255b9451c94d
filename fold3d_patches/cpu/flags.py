"""The Megatron flags that ``--device cpu`` stands for.

They go before the user's own words on the command line, so that the user's win.
"""

FLAGS = (
    "--distributed-backend=gloo",
    "--use-cpu-initialization",
    "--transformer-impl=local",
    "--attention-backend=unfused",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)
