"""Tree traversal without recursion."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Traversals of a binary tree, without recursion: trees are up to 50,000 deep.

A tree is two lists: left[i] and right[i] are the children of node i, -1 for none. The root is node 0; empty lists are the
empty tree.

preorder, inorder, postorder(left, right) -> list of nodes
levels(left, right) -> list of lists, the nodes of each depth from left to right
"""


def preorder(left, right):
    raise NotImplementedError


def inorder(left, right):
    raise NotImplementedError


def postorder(left, right):
    raise NotImplementedError


def levels(left, right):
    raise NotImplementedError
'''
SOLUTION = """def preorder(left, right):
    out, stack = [], [0] if left else []
    while stack:
        node = stack.pop()
        out.append(node)
        stack += [child for child in (right[node], left[node]) if child >= 0]
    return out


def inorder(left, right):
    out, stack, node = [], [], 0 if left else -1
    while stack or node >= 0:
        while node >= 0:
            stack.append(node)
            node = left[node]
        node = stack.pop()
        out.append(node)
        node = right[node]
    return out


def postorder(left, right):
    out, pending = [], [(0, False)] if left else []
    while pending:
        node, seen = pending.pop()
        if seen:
            out.append(node)
            continue
        pending.append((node, True))
        pending += [(child, False) for child in (right[node], left[node]) if child >= 0]
    return out


def levels(left, right):
    out, row = [], [0] if left else []
    while row:
        out.append(row)
        row = [child for node in row for child in (left[node], right[node]) if child >= 0]
    return out
"""
RECURSIVE = """def postorder(left, right):
    def visit(node):
        return [] if node < 0 else visit(left[node]) + visit(right[node]) + [node]

    return visit(0) if left else []


def unused(left, right):"""

DRILL = Drill(
    name="tree_traversal",
    topic="basics",
    difficulty=2,
    title=Text("tree traversals without recursion", "非递归树遍历"),
    task=Text(STUB.split('"""')[1], "不用递归写出二叉树的前序、中序、后序与层序遍历；树深可达 50,000。\n" + STUB.split('"""')[1]),
    stubs={"python": STUB},
    solutions={"python": SOLUTION},
    oracle="basics",
    functions=("preorder", "inorder", "postorder", "levels"),
    hints=(
        Text("What does Python's call stack hold for you in the recursive version?", "递归版本里，调用栈替你保存了什么？"),
        Text("Post-order meets a node twice: before its children and after them.", "后序会两次遇到一个节点：子树之前与之后。"),
        Text("Push (node, seen): if not seen, push it again as seen, then right, then left.", "压入 (node, seen)：未访问时重新压入已访问标记，再压右、左。"),
    ),
    questions=(
        Question("What is CPython's limit, and what happens past it?", "CPython 的递归上限是多少？超过会怎样？", "bagu drill predict generator"),
        Question("Where does bagu walk a tree?", "bagu 在哪里遍历树？", "bagu lab list"),
    ),
    planted=(
        Planted("python", "stack += [child for child in (right[node], left[node]) if child >= 0]", "stack += [child for child in (left[node], right[node]) if child >= 0]", "order"),
        Planted("python", "if child >= 0]\n    return out\n\n\ndef inorder", "if child > 0 and child != len(left) - 1]\n    return out\n\n\ndef inorder", "off_by_one|formula|edge|order"),
        Planted("python", "[0] if left else []\n    while stack:", "[0]\n    while stack:", "empty|raises"),
        Planted("python", "    while stack or node >= 0:", "    while stack:", "formula|empty|order"),
        Planted("python", "        out.append(node)\n        node = right[node]", "        node = right[node]\n        out.append(node)", "order|formula|raises|off_by_one"),
        Planted("python", "def postorder(left, right):", RECURSIVE, "recursion"),
        Planted("python", "pending += [(child, False) for child in (right[node], left[node])", "pending += [(child, False) for child in (left[node], right[node])", "order"),
        Planted("python", "        pending.append((node, True))\n        pending += [(child, False) for child in (right[node], left[node]) if child >= 0]", "        pending += [(child, False) for child in (right[node], left[node]) if child >= 0]\n        pending.append((node, True))", "order"),
        Planted("python", "row = [child for node in row for child in (left[node], right[node]) if child >= 0]", "row = [child for node in row for child in (right[node], left[node]) if child >= 0]", "order"),
        Planted("python", "        out.append(row)", "        out += row", "type|formula"),
        Planted("python", "    while row:", "    for _ in range(1000):\n        if not row:\n            break", "edge|recursion|formula"),
        Planted("python", "        row = [child for node in row for child in (left[node], right[node]) if child >= 0]", "        row = [left[node] for node in row if left[node] >= 0] + [right[node] for node in row if right[node] >= 0]", "order"),
        Planted("python", "def preorder(left, right):\n", "import sys\n\nsys.setrecursionlimit(10**6)\n\n\ndef preorder(left, right):\n    sys.setrecursionlimit(2 * 10**6)\n", "state"),
    ),
)  # fmt: skip
