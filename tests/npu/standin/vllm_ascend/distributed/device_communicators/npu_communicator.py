class NPUCommunicator:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        self.cpu_group, self.device_group, self.unique_name = cpu_group, device_group, unique_name
