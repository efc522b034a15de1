class AscendUnquantizedFusedMoEMethod:
    def __init__(self, moe=None, tid2eid=None):
        self.moe = moe

    def process_weights_after_loading(self, layer):
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(layer, name)
            weight.data = weight.data.transpose(1, 2).contiguous()
