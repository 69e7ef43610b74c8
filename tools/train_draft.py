import json, os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import draft_model as dm
def target_matrix(folder, name):
    t, _ = dm.read_safetensors(os.path.join(folder, "model.safetensors"))
    return dm.as_tensor(*t[name])
