import journal

from vllm_ascend.device_allocator.camem import CaMemAllocator


class NPUWorker:
    def sleep(self, level=1):
        model = self.model_runner.model
        self._sleep_saved_buffers = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
        journal.note("sleep", level)
        CaMemAllocator.get_instance().sleep(offload_tags=("weights",) if level == 1 else ())

    def wake_up(self, tags=None):
        journal.note("wake", tuple(tags) if tags is not None else None)
        allocator = CaMemAllocator.get_instance()
        allocator.wake_up(tags=tags)
        if self._sleep_saved_buffers:
            mapped = [data.mapped for data in allocator.pointer_to_data.values() if data.tag == "weights"]
            if not all(mapped):
                journal.breaks("weights-before-buffers", "buffers are written while the weights are unmapped")
            for name, buffer in self.model_runner.model.named_buffers():
                buffer.data.copy_(self._sleep_saved_buffers[name].data)
            self._sleep_saved_buffers = {}

    def execute_dummy_batch(self):
        self.model_runner._dummy_run(1, uniform_decode=True)
