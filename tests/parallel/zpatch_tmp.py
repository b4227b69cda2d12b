import gspo_megatron.platform
from tests.parallel.router_tmp import ExactLossRouter
from megatron.core.transformer.moe.router import TopKRouter
TopKRouter.apply_z_loss = ExactLossRouter.apply_z_loss
TopKRouter._apply_aux_loss = ExactLossRouter._apply_aux_loss
