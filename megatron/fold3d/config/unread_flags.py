"""Flags that Megatron 0.19.2 accepts and no code reads, Megatron's or ours: one warning line each.

Most belong to scripts that the package does not bring: vision, retrieval, inference, and
reinforcement learning. A test searches the installed sources for the names.
"""

from collections.abc import Iterator, Sequence

_INSTEAD = {"--rampup-batch-size": "use --step-batch-size-schedule"}
_WORDS = """
--apply-residual-connection-post-layernorm --bert-embedder-type --bert-load
--biencoder-projection-dim --biencoder-shared-query-context-model --block-data-path
--classes-fraction --data-per-class-fraction --dino-bottleneck-size --dino-freeze-last-layer
--dino-head-hidden-size --dino-local-crops-number --dino-local-img-size
--dino-norm-last-layer --dino-teacher-temp --dino-warmup-teacher-temp
--dino-warmup-teacher-temp-epochs --dist-ckpt-save-pre-mcore-014 --embedding-path
--enable-full-sharding-in-hsdp --evidence-data-path --exit-signal-handler-for-dataloader
--grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-entropy-term-weight
--grpo-filter-groups-with-same-reward --grpo-kl-beta --head-lr-mult --ict-head-size
--ict-load --indexer-batch-size --indexer-log-interval --inference-dynamic-batching
--inference-max-requests --inference-shards --inference-text-gen-server-logging
--inference-wandb-logging --inprocess-max-iterations --inprocess-progress-watchdog-interval
--iter-per-epoch --langrl-env-config --logits-load-decode-threads
--logits-load-ignore-errors --logits-load-kd-loss-alpha --logits-load-msc-prefetch-depth
--logits-load-prefetch-factor --mask-factor --mask-type --max-tokens-to-oom
--no-inference-text-gen-server-logging --no-inference-wandb-logging --no-rl-skip-bos-token
--no-rl-verify-model-weights-swap --num-channels --num-classes --onnx-safe --openai-gelu
--output-bert-embeddings --query-in-block-prob --rampup-batch-size
--retriever-report-topk-accuracies --retriever-score-scaling --rl-default-temperature
--rl-default-top-k --rl-default-top-p --rl-importance-sampling-truncation-coef
--rl-inference-parsers --rl-prompts-per-eval --rl-sequence-packing-algo
--rl-sequence-packing-max-sequences-per-bin --rl-skip-bos-token
--rl-verify-model-weights-swap --swin-backbone-type --titles-data-path --use-flash-attn
--use-legacy-static-engine --use-mcore-models --use-one-sent-docs --vision-backbone-type
--vocab-extra-ids
"""
UNREAD = frozenset(_WORDS.split())


def unread_flags(argv: Sequence[str]) -> Iterator[str]:
    """Yield one warning (found, rule, fix) per flag of a command line that has no effect."""
    given = dict.fromkeys(word.partition("=")[0] for word in argv)
    for flag in given:
        if flag in UNREAD:
            fix = _INSTEAD.get(flag, "drop it")
            yield f"{flag}: Megatron 0.19.2 accepts it and reads it nowhere; {fix}"
