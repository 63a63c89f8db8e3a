"""An environment of verifiers that plays the user: it answers each guess, and pays for the right one."""

import outside_sums
import verifiers.v1 as vf


class GuessConfig(vf.EnvConfig):
    """One role."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    """Says whether a guess is too low or too high."""

    async def run(self, task, agents):
        """Answer until the guess is right."""
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guess = segment.last_reply.strip()
                if guess == str(task.data.answer):
                    break
                too_low = guess.isdecimal() and int(guess) < task.data.answer
                segment = await interaction.turn("Too low." if too_low else "Too high.")


class GuessTaskset(outside_sums.SumTaskset):
    """The same tasks."""


__all__ = ["GuessEnv", "GuessTaskset"]
