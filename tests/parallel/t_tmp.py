import time,sys,os
if os.environ.get("Z"): import tests.parallel.zpatch_tmp
from tests.parallel.pool import Pool
from tests.parallel.models import odd_moe, VOCAB_SIZE
from gspo_megatron.train.parity import *
from gspo_megatron.config.parallel import Layout
import tests.parallel.tasks as T
if __name__=='__main__':
    p=Pool()
    import json,os; EX=json.loads(os.environ.get("EX","{}")); cfg=odd_moe("tp=1",{"name":sys.argv[1]},**EX); b=synthetic_batch(cfg.objective,VOCAB_SIZE,num_sequences=int(os.environ.get("N","13")))
    cut=Cut(4,40,2)
    t=time.time(); ref=p.run(1,first_update,config=cfg,vocab_size=VOCAB_SIZE,batch=b,cut=cut); print(time.time()-t)
    print({k:round(v,6) for k,v in ref.metrics.items()})
    for l in sys.argv[2:]:
        kw={}
        if 'vpp' in l: kw=dict(overlap_p2p_comm=True,batch_p2p_comm=False)
        cfg=odd_moe(l,{"name":sys.argv[1]},**kw,**EX)
        n=Layout.parse(l).world_size
        t=time.time(); r=p.run(n,first_update,config=cfg,vocab_size=VOCAB_SIZE,batch=b,cut=cut)
        print(l,n,'%.1fs'%(time.time()-t), [(a,'%.1e'%e) for a,e in compare(ref.gradients,r.gradients)[:3]], 'rep %.1e'%r.replica_error, 'loss %.1e norm %.1e'%tuple(abs(r.metrics[k]-ref.metrics[k])/abs(ref.metrics[k]) for k in('loss','grad_norm')), sorted(((abs(r.metrics[k]-v)/(abs(v)+1e-6),k) for k,v in ref.metrics.items()),reverse=True)[:3],flush=True)
