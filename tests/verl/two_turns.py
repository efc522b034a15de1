"""A user's agent loop with two turns: the first eight tokens, then the rest. Half of the CI run's prompts use it."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

FIRST = 8


class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        request_id, tokens, logprobs, fields = uuid4().hex, [], [], {}
        limit = self.rollout_config.response_length
        for most in (FIRST, limit - FIRST):
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=prompt + tokens,
                sampling_params={**sampling_params, "max_tokens": most},
            )
            tokens, logprobs = tokens + output.token_ids, logprobs + (output.log_probs or [])
            fields = {**output.extra_fields, **{name: fields[name] for name in ("min_global_steps",) if name in fields}}
            if len(output.token_ids) < most or tokens[-1] == self.tokenizer.eos_token_id:
                break
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens,
            response_mask=[1] * len(tokens),
            response_logprobs=logprobs or None,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={**fields, "turn_scores": [], "tool_rewards": []},
        )
