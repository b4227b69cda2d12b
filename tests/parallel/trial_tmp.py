import time
from tests.parallel.pool import Pool
def f(x):
    import torch.distributed as dist, torch
    t=torch.tensor([float(dist.get_rank())]); dist.all_reduce(t)
    return float(t), x
def bad(x):
    import torch.distributed as dist, torch
    if dist.get_rank()==1: raise ValueError("boo")
    dist.barrier()
if __name__=='__main__':
    p=Pool()
    for n in (1,2,8,8,4,1,2):
        t=time.time(); print(n, p.run(n,f,x=3), time.time()-t, flush=True)
    t=time.time()
    try: p.run(2,bad,x=1)
    except AssertionError as e: print(e, time.time()-t)
    t=time.time(); print(p.run(2,f,x=3), time.time()-t)
