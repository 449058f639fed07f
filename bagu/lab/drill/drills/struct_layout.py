"""The memory layout of a C struct."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""The memory layout of a C struct on a 64-bit machine.

layout(fields, packed) -> (offsets, size, alignment)
    fields: a list of (type, count). type is "char", "short", "int", "long long", "float", "double", "pointer", or a list of
    fields (a nested struct, laid out by the same rules); count > 0 makes an array, 0 a single member.
    packed: no padding anywhere, as with #pragma pack(1)

Each member begins at a multiple of its alignment; the struct's alignment is its largest member's, and its size a multiple
of it. A struct without members has size 0 and alignment 1.
"""


def layout(fields, packed):
    raise NotImplementedError
'''
SOLUTION = """SIZES = {"char": 1, "short": 2, "int": 4, "long long": 8, "float": 4, "double": 8, "pointer": 8}


def layout(fields, packed):
    offsets, at, widest = [], 0, 1
    for kind, count in fields:
        if isinstance(kind, str):
            size, align = SIZES[kind], SIZES[kind]
        else:
            _, size, align = layout(kind, packed)
        align = 1 if packed else align
        at = (at + align - 1) // align * align
        offsets.append(at)
        at += size * max(count, 1)
        widest = max(widest, align)
    return offsets, (at + widest - 1) // widest * widest, widest
"""

DRILL = Drill(
    name="struct_layout",
    topic="basics",
    difficulty=2,
    title=Text("the layout of a C struct", "C/C++ 结构体内存布局"),
    task=Text(STUB.split('"""')[1], "算出 C 结构体（含数组、嵌套、packed）的各成员偏移、大小与对齐。\n" + STUB.split('"""')[1]),
    stubs={"python": STUB},
    solutions={"python": SOLUTION},
    oracle="basics",
    functions=("layout",),
    modules=("struct",),
    hints=(
        Text("Where may an int begin?", "int 可以从哪里开始？"),
        Text("Round the offset up to the member's alignment; at the end round the size up to the struct's.", "把偏移向上取整到成员的对齐；最后把大小取整到结构体的对齐。"),
        Text("An array aligns as its element, a nested struct as its widest member; packed makes every alignment 1.", "数组按元素对齐，嵌套结构体按最宽成员对齐；packed 时对齐全为 1。"),
    ),
    questions=(
        Question("How does the order of members change the size?", "成员顺序如何影响大小？", "bagu drill predict struct"),
        Question("Why does a GPU want 16-byte alignment?", "GPU 为什么喜欢 16 字节对齐？", "bagu ops show rms_norm --kernel"),
    ),
    planted=(
        Planted("python", "        at = (at + align - 1) // align * align\n", "", "padding"),
        Planted("python", "(at + widest - 1) // widest * widest, widest", "at, widest", "padding"),
        Planted("python", "size * max(count, 1)", "size", "ignored|formula"),
        Planted("python", "size * max(count, 1)", "size * count", "ignored|formula|off_by_one"),
        Planted("python", "align = 1 if packed else align", "align = align", "ignored|padding"),
        Planted("python", "        align = 1 if packed else align\n", "        align = size * max(count, 1) if isinstance(kind, str) and not packed else 1 if packed else align\n", "padding"),
        Planted("python", "\"long long\": 8", "\"long long\": 4", "formula|padding"),
        Planted("python", "\"pointer\": 8", "\"pointer\": 4", "formula|padding"),
        Planted("python", "_, size, align = layout(kind, packed)", "_, size, _ = layout(kind, packed)\n            align = size", "padding|raises"),
        Planted("python", "_, size, align = layout(kind, packed)", "_, size, align = layout(kind, True)", "padding"),
        Planted("python", "offsets, at, widest = [], 0, 1", "offsets, at, widest = [], 0, 0", "empty|raises"),
        Planted("python", "widest = max(widest, align)", "widest = align", "padding|order"),
        Planted("python", "        offsets.append(at)\n        at += size * max(count, 1)", "        at += size * max(count, 1)\n        offsets.append(at)", "off_by_one|order|padding|formula"),
        Planted("python", "widest * widest, widest", "widest * widest, 8", "formula|padding|edge"),
    ),
)  # fmt: skip
