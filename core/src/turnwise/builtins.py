"""
The core's own plugin: what turnwise itself registers, through the same door as every other plugin.

The entry point ``builtins`` of the group ``turnwise`` names this module, and `turnwise.host.load` always loads it. It
has no hooks: every engine, parser, agent and reward is a package of its own.
"""
