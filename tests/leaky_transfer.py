"""A worker extension for one test: the gloo engine, with a switch that leaves out packing the tied head again."""

import gloo_transfer


class Extension(gloo_transfer.WorkerExtension):
    def leave_out_packing(self, leave_out: bool) -> None:
        engine = self.weight_transfer_engine
        engine.pack_head_again = (lambda: None) if leave_out else gloo_transfer.GlooEngine.pack_head_again.__get__(engine)
