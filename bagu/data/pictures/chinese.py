"""Chinese names of characters, made from their English names word by word.

Unicode names are built of few words ("BLACK SQUARE", "LEFTWARDS DOUBLE ARROW"), so a table of words names combinations
that nobody has listed. A name with a word that is not in the table has no Chinese name, and no picture in the corpus.
"""

import re

_TABLE = """
DOTS 点 BRAILLE 盲文 PATTERN 图案 ARROW 箭头 RIGHT 右 LEFT 左 BOX 框 DRAWINGS 绘制 AND 和 BLACK 黑 HEAVY 粗 WHITE 白
TO 至 DOUBLE 双 EQUAL 等于 SIGN 号 THAN 于 LIGHT 细 RIGHTWARDS 向右 UP 上 OR 或 VERTICAL 垂直 DOWN 下 SQUARE 方块
NOT 非 OF 之 HORIZONTAL 水平 LOWER 下部 CIRCLED 带圈 UPPER 上部 ABOVE 在上 LEFTWARDS 向左 LESS 小 GREATER 大
POINTING 指向 MARK 标记 BRACKET 括号 HALF 半 SMALL 小型 CIRCLE 圆 ROMAN 罗马 NUMERAL 数字 TRIANGLE 三角形 BAR 条
SINGLE 单 ONE 一 UPWARDS 向上 DIGIT 数码 SYMBOL 符号 DOT 圆点 DOWNWARDS 向下 SANS 无 SERIF 衬线 INTEGRAL 积分
QUADRANT 象限 LINE 线 STAR 星 FRACTION 分数 STROKE 笔画 ORNAMENT 装饰 DINGBAT 印饰 SLANTED 斜体 QUOTATION 引用
ASTERISK 星号 ANGLE 角 VULGAR 普通 OPERATOR 运算符 BLOCK 块 TWO 二 DASH 短划 THREE 三 MEDIUM 中等 PARENTHESIS 圆括号
EIGHT 八 EAST 东 EQUALS 等号 SUPERSCRIPT 上标 CURLY 花 SUBSCRIPT 下标 CROSS 十字 REVERSED 反向 TRIPLE 三重 FOUR 四
FIVE 五 LONG 长 OPEN 开放 EQUIVALENT 等价 MINUS 减 NORTH 北 SHADOWED 带影 PLUS 加 SOUTH 南 HEADED 头 FROM 从 CORNER 拐角
TOP 顶 HARPOON 鱼叉 PRECEDES 先于 SUCCEEDS 后于 DIAMOND 菱形 CHESS 国际象棋 SPOKED 辐条 BULLET 项目符 N 多 ARY 元
WEST 西 HOOK 钩 FOR 为 DOES 是否 ELEMENT 元素 POINTED 尖 SIX 六 SEVEN 七 TILDE 波浪号 NOR 亦非 NORMAL 正规 DIAGONAL 对角
BOTTOM 底 RECYCLING 回收 NEGATIVE 负 EIGHTHS 八分 CONTAINS 包含 NEITHER 既非 ARC 弧 FACE 面 TEARDROP 泪滴
EXCLAMATION 感叹 QUESTION 疑问 QUADRUPLE 四重 TURNED 倒转 TIP 尖端 BARB 倒钩 BUT 但 SUBGROUP 子群 ARMENIAN 亚美尼亚
HEART 心 SUIT 花色 SIMILAR 相似 PRIME 撇 NINE 九 EIGHTH 八分之一 OVER 覆于 AS 如 PRODUCT 积 ALMOST 几乎 IMAGE 像
TIMES 乘 X 叉 FILL 填充 TYPE 类型 PLASTICS 塑料 OUTLINED 描边 CENTRE 中心 FEATHERED 羽毛 COMMA 逗号 TEN 十 THOUSAND 千
QUARTER 四分之一 GREEK 希腊 ANTICLOCKWISE 逆时针 CLOCKWISE 顺时针 DASHED 虚线 RING 环 LOGICAL 逻辑 SUBSET 子集
SUPERSET 超集 A 甲 EXTENSION 延伸 INDEX 食指 DIE 骰子 MATHEMATICAL 数学 HYPHEN 连字符 AT 位于 INVERTED 颠倒 CAPITAL 大写
ELLIPSIS 省略号 ARROWS 双箭头 END 末端 UNION 并集 APPROXIMATELY 近似 THE 该 ORIGINAL 原 OVERBAR 上划线 ARROWHEAD 箭尖
RECTANGLE 矩形 BALLOT 选票 LOW 低 COLON 冒号 SLASH 斜线 MULTIPLICATION 乘法 DIVISION 除法 HUNDRED 百 WAVE 波
PAIRED 成对 ON 之上 PEDESTAL 底座 INTERSECTION 交集 MUCH 远 SQUARED 方框 TACK 图钉 BOWTIE 领结 SEMIDIRECT 半直 CROP 裁切
LOZENGE 菱块 APL 程式 FUNCTIONAL 函数式 PIECE 棋子 POINTER 指针 INVERSE 反白 CIRCULAR 环形 SCISSORS 剪刀 FLORETTE 小花
INTEGRATION 求积 INSIDE 在内 APPROXIMATE 约 PENTAGON 五边形 HIGH 高 NUMBER 编号 FULL 全 ZERO 零 CURRENCY 货币 DEGREE 度
MIDDLE 中部 QUARTERS 四分 FIFTHS 五分 TWELVE 十二 D 维 SQUIGGLE 曲线 ALL 所有 MEMBER 成员 CONTAIN 含 ROOT 根
PARALLEL 平行 CONTOUR 围道 S 款 BY 由 MULTISET 多重集 TURNSTILE 十字转门 BAG 袋 SHADE 阴影 SUN 太阳 TELEPHONE 电话
CHECK 勾 ROTATED 旋转 FLORAL 花卉 CLUB 梅花 MUSIC 音乐 PAPER 纸 PENCIL 铅笔 LATIN 拉丁 BALLOON 气球 PINWHEEL 风车
SNOWFLAKE 雪花 CURVED 弯 AROUND 环绕 POLE 极 HEXAGON 六边形 DAGGER 剑号 AMPERSAND 与号 APOSTROPHE 撇号 STOP 句点
SOLIDUS 斜杠 PER 每 SEMICOLON 分号 COMMERCIAL 商业 INTERROBANG 疑叹 QUILL 羽笔 PILCROW 段号 EURO 欧元 COPYRIGHT 版权
RUPEE 卢比 LIRA 里拉 IOTA 约塔 SUMMATION 求和 L 升 THIRDS 三分 ELEVEN 十一 FIFTY 五十 TAIL 尾 LOOP 圈套 LEADER 引导
SEMICIRCLE 半圆 THERE 有 SET 集合 MEASURED 测量 PROPORTION 比例 ASYMPTOTICALLY 渐近 ACTUALLY 实际 GEOMETRICALLY 几何
BETWEEN 之间 IN 在 IDENTICAL 恒等 PRECEDE 先 SUCCEED 后 TRUE 真 UNDER 下方 RELATION 关系 FACTOR 因子 VERY 非常
UNDERBAR 下划线 CEILING 上取整 FLOOR 下取整 ERASE 删除 BENZENE 苯 RHO 柔 FUNCTION 功能 CONTAINING 内含
CROSSHATCH 网格 PARALLELOGRAM 平行四边形 DOTTED 点状 LARGE 大型 RAYS 光芒 UMBRELLA 雨伞 NODE 交点 HOT 热 SHOGI 将棋
HAMMER 锤 YIN 阴 YANG 阳 SMILING 微笑 MOON 月亮 FEMALE 女 MALE 男 KING 王 QUEEN 后冠 ROOK 车 BISHOP 象 KNIGHT 马 PAWN 兵
SPADE 黑桃 NOTE 音符 BEAMED 连音 NOTES 双音符 SYRIAC 叙利亚 UNIVERSAL 通用 RECYCLED 再生 MONOGRAM 单爻 FLAG 旗 STAFF 杖
BLADE 刀刃 HAND 手 NIB 笔尖 RECTILINEAR 直线 PETALLED 花瓣 SPARKLE 闪光 PROPELLER 螺旋桨 DROP 滴 PARAGRAPH 段落
FLATTENED 扁平 TORTOISE 龟 SHELL 壳 POINT 尖点 LIGHTED 照亮 SHADED 阴面 TILTED 倾斜 NOTCHED 缺口 WEDGE 楔 TAILED 尾部
SHAPED 形 DELIMITER 分隔 GAPPED 间断 CLOSED 封闭 BESIDE 旁边 PATH 路径 REPLACEMENT 替换 CHARACTER 字符
"""
_PARTS = _TABLE.split()
WORDS = dict(zip(_PARTS[::2], _PARTS[1::2], strict=True)) | {str(n): str(n) for n in range(10)}


def words_of(name: str) -> list[str]:
    """The words of a Unicode name; digits are words of their own, so that DOTS-124 is three dots."""
    return re.findall(r"[A-Z]+|\d", name)


def chinese_name(name: str) -> str | None:
    """The Chinese name, None if a word is not in the table. "A WITH B" becomes "带 B 的 A"."""
    main, *extras = name.split(" WITH ")
    texts = []
    for part in (*reversed(extras), main):
        found = [WORDS.get(word) for word in words_of(part)]
        if not found or None in found:
            return None
        texts.append("".join(str(word) for word in found))
    return "".join(f"带{text}的" for text in texts[:-1]) + texts[-1]
