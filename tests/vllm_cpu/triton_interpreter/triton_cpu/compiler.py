"""Triton looks for a compiler here; nothing is ever compiled."""

from triton.backends.compiler import BaseBackend


class Compiler(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "cpu-interpreter"

    def parse_options(self, options):
        raise NotImplementedError("set TRITON_INTERPRET=1: there is no compiler for CPUs here")

    def add_stages(self, stages, options, language=None):
        raise NotImplementedError

    def load_dialects(self, context):
        raise NotImplementedError

    def get_module_map(self):
        return {}

    def pack_metadata(self, metadata):
        return metadata

    def get_codegen_implementation(self, options):
        return {}
