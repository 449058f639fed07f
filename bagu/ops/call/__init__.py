"""How a call runs: from the public function (dispatch.py) to a backend, and its gradients (node.py, custom.py)."""
