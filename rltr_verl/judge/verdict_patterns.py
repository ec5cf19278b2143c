"""The patterns by which :mod:`rltr_verl.judge.verdict` reads a reply, in English and Chinese."""

from __future__ import annotations

import re

TAIL = 20_000
MAX_OBJECTS = 64
MAX_ANCHORS = 500
"""Bounds on the work for a reply that a judge would not write."""
REASON_CHARS = 500

THOUGHT = r"(?:\w{1,20}:)?(?:think|thinking|thought|reasoning|analysis|scratchpad|reflection)"
THINK_OPEN = re.compile(
    rf"<{THOUGHT}>|\[think\]|◁think▷|<\|(?:think|begin_of_thought)\|>|<\|channel\|>(?:analysis|commentary)\b",
    re.IGNORECASE,
)
THINK_CLOSE = re.compile(
    rf"</{THOUGHT}>|\[/think\]|◁/think▷|<\|(?:/think|end_of_thought)\|>|<\|channel\|>final\b", re.IGNORECASE
)
TEMPLATE = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|<eos>")
NOT_FIGURES = re.compile(
    "[^\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2089\u2150-\u2189\u2460-\u24ff\u2776-\u2793"
    "\u3248-\u324f\u3251-\u325f\u3280-\u3289\u32b1-\u32bf]+"
)
"""All but superscripts, fractions and circled numbers, which compatibility forms would turn into plain digits."""

FINAL_WORD = (
    r"(?:my\s+|the\s+)?final|overall|revised|corrected|on reflection|on second thought|correction|actually|wait"
    r"|最终|最終|最后|最後|更正|修正"
)
FINAL = re.compile(rf"\b(?:{FINAL_WORD})", re.IGNORECASE)
QUOTED = re.compile(r""""[^"\n]+"|(?<!\w)'[^'\n]+'(?!\w)|“[^”\n]+”|‘[^’\n]+’|`[^`\n]+`|「[^」\n]+」""")
REPORTS = re.compile(
    r"(?<!\bI )\b(?:says?|said|claim(?:s|ed|ing)?|stat(?:es|ed|ing)|assert(?:s|ed|ing)?|declare[sd]?|wr(?:ites?|ote"
    r"|itten)|tells?|told"
    r"|instruct(?:s|ed|ing|ion)?|fake|forged|injected|string|phrase|quoted?|ends with|self)\b"
    r"|\b(?:planner|policy|agent|model)(?:'s|’s)? (?:own )?(?:text|output|note|message|answer|words|verdict|score"
    r"|rating)\s*$"
    r"|\b(?:tool|page|article|site|website)['’]s\b|\b(?:last|final) message\b"
    r"|\bask(?:s|ed)(?:\s\w+){0,3}\s*$|\b(?:shows?|reads?|contain(?:s|ed|ing)?|includ(?:es|ed|ing)|return(?:s|ed)?"
    r"|(?:result"
    r"|output|observation) (?:of [\w ]{1,20})?(?:is|was|reads))"
    r"(?:\s\w+){0,3}\s*$"
    r"|[声聲自宣][称稱]|[写寫][着著道]|注入|要求|包含|返回|自[评評]|自(?:我|己|[评評])?\s*$|[轨軌][迹跡](?:末尾"
    r"|[结結]尾|最后"
    r"|最後|中|里|裡)\s*$",
    re.IGNORECASE,
)
IGNORED = re.compile(
    r"\b(?:ignor|disregard|inject|manipulat|forge|fake|not (?:mine|valid)|invalid|note in|attempt(?:s|ed|ing)? to"
    r"|the planner's words|(?:returned|written) by the (?:tool|planner|policy))|注入|忽略|[伪偽]造|不予[理采採]",
    re.IGNORECASE,
)
"""A sentence about a verdict that others wrote."""
LABELS = (
    r"(?:final|overall|evaluation)[ _]?(?:score|verdict|answer|rating|decision|judge?ment|result)|final|overall"
    r"|score|verdict"
    r"|conclusion"
    r"|rating|judge?ment|decision|is[ _]?complete|completeness[ _]?(?:score|verdict|rating)|completeness|complete"
    r"|(?:最[终終后後])?(?:[评評][分价價]|得分|分[数數]|[打给給]分|[结結][论論]|(?:判[断斷定]"
    r"|[评評][判估定])(?:[结結]果)?)|最[终終](?:答案|[结結]果)?"
    r"|是否完整|完整性|完整"
)
WEAK_LABELS = r"answer|output|result|vote|label|[结結]果|答案|[输輸]出"
"""A judge also speaks of the results of tools: these count as labels only in JSON or at the start of a line.

These patterns also say what :mod:`rltr_verl.judge.neutral` disarms.
"""

ANOTHER = re.compile(
    r"\b(?:planner|policy|agent|user|tool|observation)\s*:\W*$|\b(?:partial|sub|confidence|certainty|probability"
    r"|similarity|f1|fail(?:ure)?|error|missing|incomplete(?:ness)?|max(?:imum)?"
    r"|min(?:imum)?|best|worst|highest|lowest|possible|previous|prior|expected|baseline|accuracy|precision|recall"
    r"|quality"
    r"|efficiency|relevance|helpfulness|style|difficulty)[\s_-]*$"
    r"|(?:置信度?|[错錯][误誤]|[满滿]分|不完整性?|缺失|[预預][期计計]|之前|上次|最[高低]|相似度?|[质質]量|效率)\s*$"
    r"|\b(?:examples?|e\.g\.|format|for instance)\W*$|(?:例如|比如|示例|格式)\W*$",
    re.IGNORECASE,
)
"""Before a label: it is the label of something else, or of an example."""
STRONG_KEY = re.compile(LABELS, re.IGNORECASE)
JSON_KEY = re.compile(rf"(?:{LABELS}|{WEAK_LABELS})", re.IGNORECASE)
REASON_KEY = re.compile(
    r"(?:short_|brief_)?(?:reasons?|reasoning|explanation|rationale|justification|analysis|comment)|理由|原因|分析"
    r"|[说說]明",
    re.IGNORECASE,
)
GAP = r"[\"'“”‘’「」『』【】*`_\s✅❌✔✖☑❎\ufe0f]{0,20}"
SCALE = (
    r"(?:[(\[]\s?(?:0\s?(?:/|-|or|或|,)\s?1|1\s?(?:/|or|或|,)\s?0)\s?[)\]]"
    r"|[(\[]\s?0\s?[=:][^()\d\n]{1,30}1\s?[=:][^()\d\n]{1,30}[)\]])?"
)
EQUALS = r"(?::|=>|=|->|→|\bis\b:?|[为為]:?|是(?!否):?|\s[-–—](?=\s)|\s\|(?=\s)|】)"
LABEL = re.compile(
    rf"(?:(?<![a-z不非未])(?<![a-z0-9]_)({LABELS}){GAP}\]?{SCALE}{GAP}{EQUALS}"
    rf"|^[*_#>\-\s]{{0,9}}({WEAK_LABELS}){GAP}[:=]"
    rf"|^[*_#>\-\s\[]{{0,9}}(?!complete\b|完整)(?:{LABELS})[*_\]\s]{{1,5}}(?=[01][*_.。\s]{{0,5}}$)){GAP}(?=\S)",
    re.IGNORECASE | re.MULTILINE,
)
LABEL_ENDS = re.compile(rf"(?:{LABELS}|{WEAK_LABELS}){GAP}{EQUALS}\s*$", re.IGNORECASE)
BRACKETS = re.compile(
    r"\[\[([^\[\]\n]{0,40})\]\]|\\boxed\{(?:\\text\{)?([^{}\n]{0,40})\}"
    rf"|<(?:{LABELS}|{WEAK_LABELS})>([^<>]{{0,40}})</"
    r"|(?:\bI(?:'ll|\swill|\stherefore)?\s(?:give|assign|rate|vote|award|score)\s(?:(?:it|(?:this|the)(?:\s\w+)?)\s)?"
    r"(?:an?\s)?(?:(?:score|rating|verdict)\s(?:of\s)?)?|(?:[给給]予?|[评評][为為]?|得|判[为為]"
    r"|打)(?=\s?[01]\s?(?:分|$|[。，,（(])))"
    r"[*_\s]{0,4}((?<!\d)[01](?![\d])[^\n]{0,40})",
    re.IGNORECASE,
)
NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
WRAPPED = re.compile(r"^[\[(【「『]\s?([01](?:\.0+)?)\s?[\])】」』]")
ONE_DIGIT = re.compile(r"[-+]?0(?:\.0+)?|\+?1(?:\.0+)?")
BARE = re.compile(
    r"\s*(?:[-*>#]+\s+)?[*_`\"'“(\[]*(?:✅\s*(?=1)|❌\s*(?=0))?([01])(?:\.0+)?(?:\s*/\s*1)?\s*分?[*_`\"'”)\]。\s]*"
    r"(?:[,;:–—-]\s*(?:because\b|since\b|as\b|due to\b|因[为為]|由于|由於).*)?",
    re.IGNORECASE,
)
BEYOND = re.compile(
    r"[\ufe0f\u20e3+^±]|\*\d|[-.,~]\d|\.\.|\s*[★☆⭐]|\s*[(\[]?\s*(?:on\s|a\s)*scale\b|\s*(?:%|[-–~]\s?\d"
    r"|(?:/\s*1\s*)?\?"
    r"|(?:分|points?)?\s*[(\[]?\s*(?:/(?!/)|out of\b|of\b|in\b|[满滿总總]分(?:为|為|是)?:?)(?!\s*1(?!\d|\.\d)))",
    re.IGNORECASE,
)
"""After a number: it is part of a larger one, or of a scale other than 0 to 1."""
ALONE = re.compile(
    r"\s*(?:分|points?\b)?\s*(?:$|[^\w\s]|_+(?:\W|$)|(?:/|out of|of)\s*1|(?:because|since|as|for|due|and|with|given"
    r"|so|but|meaning"
    r"|indicating|(?:in|not )?complete|reason|explanation|justification|note|score|verdict)\b"
    r"|[因由表即代故]|理由|原因|[说說]明|[结結][论論]|不?完整)",
    re.IGNORECASE,
)
"""After a number: it counts nothing ("1 call is missing")."""
LIST = re.compile(r"[01][.、)](?:\s+|(?<=、))\S")
NEXT_ITEM = re.compile(r"(?:^|[\s;；。])2[.、)]", re.MULTILINE)
LEGEND = re.compile(rf"(?:incomplete|不完整){GAP}(?:[:=为為]|is\b|->|→){GAP}[01]", re.IGNORECASE)
FIELD = re.compile(
    r"[\"']([^\"'\\\n]{1,40})[\"']\s{0,9}:\s{0,9}(?:\"(?:[^\"\\]+|\\.)*(?:\"|\\?$)|'(?:[^'\\]+|\\.)*(?:'|\\?$))",
    re.DOTALL,
)

CLAUSE = re.compile(
    r"([.!](?=\s|$)|[?;,:\n。！？；，：]|(?<!anything )(?<!all )\bbut\b|\bhowever\b|但|然而)", re.IGNORECASE
)
SENTENCE = re.compile(r"[.!?](?=\s|$)|[。！？\n]")
MAPPED = re.compile(r"(?:\(|->|→|=>|=)\s*([01])(?![\d.])|\s([01])\s*$")
END = (
    r"(?=[*_\s]*\s[-–—]{1,2}\s|\s*\((?!for\b|in\b)|[^\w\n]*(?:$|\b(?:and(?! utter| total)|because|since|as(?! far"
    r"| regards| if)"
    r"|for (?:(?:the|this|that|given|user's) )*(?:query|question|task"
    r"|request)|so(?! far)|with (?:no|all|every\w*|nothing)|given|overall|now|plan|trajectory|sequence)\b"
    r"|(?<=[(>→=\s])[01](?:\W|$)))"
)
WHOLE = "完[整备備]"
WORD = re.compile(
    rf"(?P<no>\bincomplete\b{END}|\bunfinished\b{END}|\bpartial(?:ly)?\b|部分完[成整])"
    rf"|(?P<yes>\bcomplete\b{END}|{WHOLE}(?![性度地为為]|的[^\s*\"'”)]))"
    rf"|(?P<done>\bcompleted?\b|完成|完全)",
    re.IGNORECASE,
)
NEAR_NOT = re.compile(
    r"(?:(?:\bnot|n't|\bnever)(?:\s+(?!only\b)[\w'-]+){0,3}\s*|\b(?:not|non|in|un)-|\b(?:far from|anything but"
    r"|short of|fails? to be)\s*(?:being\s+)?"
    r"|[不未没沒][^不未没沒非]{0,3}|非(?!常)[^不未没沒非]?)$",
    re.IGNORECASE,
)
TWICE_NOT = re.compile(r"[不未没沒非][^不未没沒非]{0,2}$")
ANY_NOT = re.compile(
    r"\b(?:not|no|never|nor|neither|without|hardly|barely|lacks?|far from|nothing|none|fail(?:s|ed)?"
    r"|false|untrue|wrong|doubt|dis\w+|reject|den(?:y|ies))\b|n't|[不未没沒无無难難]|非(?!常)",
    re.IGNORECASE,
)
HEDGE = re.compile(
    r"\b(?:unsure|unclear|uncertain|whether|if|may|might|maybe|perhaps|possibly|probably|likely|seems?|appears?|could"
    r"|would|should|depends?|almost|nearly|mostly|cannot|can't|can not|unable|hard to|difficult to|not sure|either"
    r"|only"
    r")\b"
    r"|无法|無法|不能|不确定|不確定|难以|難以|可能|也许|也許|是否|如果|假如|除非|不清楚|几乎|幾乎|基本|大致|大体"
    r"|大體|接近|近乎"
    r"|差不多|似乎|看似|应该|應該|只有|既|\d\s*%|complete\W{0,3}(?:or\b|/|\|)|(?:/|\|)\W{0,2}(?:in)?complete"
    r"|\bcomplete with (?:errors?|warnings?)|\b(?:request|stream\w*|job|response|generation|download|upload"
    r"|process\w*"
    r"|transfer) (?:is |was )?complete|[声聲自宣][称稱]|有待|才|[与與]否|只差|[还還]差|doubt"
    r"|(?:或者?|还是|還是)[不未]|[离離距]|\bas complete as\b|不一定|未必|不见得|不見得|\bnecessarily\b",
    re.IGNORECASE,
)
SUBJECT = re.compile(
    r"(?:[\s*_\"'“(]*[01]\s*[)(,:–—-]*)?(?:[\s\"'“”‘’()\[\]【】「」#>_+–—→✅✔☑\ufe0f🟢.-]|\b(?:the|this|that"
    r"|these|those|its?|an?|all|both|whole|entire|everything|of|for|query|question"
    r"|task|request|needed|necessary|required|tools?|tool[- ]calls?|calls?|calling|usage|use|plan(?:ning)?"
    r"|(?:planner|agent|model)['’]s|they|making|by the (?:planner|agent|model)"
    r"|trajectory"
    r"|sequences?|sets?|chain|steps?|actions?|coverage|information|search(?:es)?|gathering|collection|is|are|was|were"
    r"|has|have|been|be(?!\s+complete\s+when)|being|it's|that's|i|we|my|find|consider|judge|deem|call|rate|mark"
    r"|conclude|confirm|believe|say"
    r"|considered|judged|deemed|to|as|therefore|thus|so|hence|and|also|indeed|now|fully|clearly|overall|quite|very"
    r"|which|makes?"
    r"|with|made|thereby|verdict|conclusion|here|yes|ok|okay|answer|final|executed|done|in)(?!\w)"
    r"|本次?|[该該此这這的是为為已都均很也且即故我及和地]|工具|[调調]用|序列|[计計][划劃]|[规規][划劃](?:器的)?"
    r"|[轨軌][迹跡]|[这這][个個些]|非常|十分|[已曾][经經]|[认認][为為]|判[定断斷]"
    r"|[结結][论論]|[结結]果|因此|所以|[综綜](?:上(?:所述)?|合)|[总總][体體之]|整[体體]|上|[来來]看|看|信息"
    r"|[资資][讯訊]|收集|[获獲]取|查[询詢]|[检檢]索|搜索"
    r"|步[骤驟]|所有|全部|必要|所需|需要的|覆[盖蓋]|[视視][为為]|[属屬]于|[过過]程|最[终終]|[链鏈]"
    r"|[评評][估价價](?=[为為是])"
    r"|[显顯]然|明[显顯]|[确確][实實]|足[够夠]|[达達]到|安排|操作|方案)*",
    re.IGNORECASE,
)
"""All that may stand before "complete" in a clause that calls the calls complete; after any other word it may be about
a part of them, a wish or somebody's claim."""
INTRODUCES = re.compile(
    rf"(?:{SUBJECT.pattern}|\b(?:evaluation|assessment|summary|result|judge?ment|decision|analysis|reason(?:ing)?"
    rf"|true|pass)"
    r"\b|[回答]|我|[判评評][断斷判]|合格|通[过過])*",
    re.IGNORECASE,
)
"""What may stand before a colon and "complete"; other words name something else that is complete."""
NO_SUBJECT = re.compile(
    r"\W*(?:(?:is|are|was|were|does|to|for|(?:(?:the|its|final) )*(?:query|question|task|request|answer"
    r"|search) (?:is|was))\b)",
    re.IGNORECASE,
)
CONCLUDES = re.compile(
    r"[\s*_]*(?:therefore|thus|hence|overall|in conclusion|in summary|因此|所以|[综綜]上"
    r"|[总總][之体體])",
    re.IGNORECASE,
)
LACK = re.compile(
    r"\b(?:missing|misses|missed|lack\w*|incomplete|omit\w*|gaps?|skipp?\w*|except|apart from|other than|absent"
    r"|never|not|though|although)\b|n't\b"
    r"|[缺漏]|遗[漏失]|遺[漏失]|[不未没沒]|除了|除非",
    re.IGNORECASE,
)
NO_LACK = re.compile(
    r"(?:\b(?:nothing|no|none|never|without|not|nor)\b|n't\b|[没沒]有?|[无無未不])[^.;,。；，\n]{0,40}?"
    r"(?:miss(?:es|ed|ing)?\b|lack\w*|omit\w*|omissions?|gaps?|skipp\w*|left out|need(?:s|ed)?|necessary|required"
    r"|[缺漏]\w?"
    r"|遗[漏失]|遺[漏失]|需要?)",
    re.IGNORECASE,
)
ASKS_ALL = re.compile(
    r"\b(?:complete|all|every\w*|each|both|sufficient|enough|cover\w*|pass\w*|satisf\w*|met)\b|完[整备備成全]|齐全"
    r"|齊全|所有|全部|足[够夠]|通[过過]|[满滿]足|[对對]",
    re.IGNORECASE,
)
TURNS = re.compile(
    r"\W*(?:but|yet|however|if|unless|save|barring|bar|minus|sans|almost|nearly|partial(?:ly)?|mostly|但|然而|如果"
    r"|就差|只差)"
    r"|\s*:=|\s*:\s*(?:none|no|not|nope|null|unknown|n/?a|0)\b",
    re.IGNORECASE,
)
"""After "complete" or "yes": what takes it back."""
CORRECTION = r"(?:→|->|=>)\s*[01]\b|\b(?:corrected|changed|revised|wait)\b|更正|修正|改[为為]"
CHANGED = re.compile(CORRECTION, re.IGNORECASE)
LIMITED = re.compile(rf"{CORRECTION}|\b(?:if|only|unless|partial(?:ly)?)\b|如果|除非", re.IGNORECASE)
"""After a number: it is taken back, or holds for a part only."""
CROSS = re.compile("[❌✗✘×👎🔴]")
AFTER = re.compile(r"[的了]?(?:\W|\s*[01]?\W*$|[覆包涵且并並因地回满滿])")
CONDITION = re.compile(r"\W*(?:if|had|unless|were)\b|\W*(?:如果|假如|若|要是|只要)", re.IGNORECASE)
EXPLAINED = re.compile(r"[*_\"'`]*([01])[*_\"'`]*\s*(?::|[–—]|-\s)\s*(\D.{3,})")
VALUED = re.compile(r"\s*[:=：]\s*(?:[01]|yes|no|true|false|是|否|不|pass|fail)", re.IGNORECASE)
NUMBERED = re.compile(r"\s*(?:0\s*/\s*1|[01]\.)\s*")
EMPHASIS = re.compile(r"[*`]+|__+")
FENCE = re.compile(r"\s*(?:`{3,}|~{3,})\w*\s*")
LEADING = re.compile(r"[\s*_\"'(]*([01])\s*[)(,:–—-]")
ASKED = re.compile(r"[^.!?。！？\n]{0,200}[?？]")
QUESTION = re.compile(r"[吗嗎呢]\s*$")
SHORT = re.compile(
    r"[\s*_\"'“→>-]*(?:(?P<yes>yes|true|pass(?:ed)?|是的?|对|對|通过|通過|合格|已?完成)"
    r"|(?P<no>no|false|fail(?:ed)?|否|不(?=\W*$)|不是|错|錯|(?:[不未]|[没沒]有?)通[过過]|不合格))[\s*_\"'”]*"
    r"(?=$|[.,;:!。，；：！})\]–—]|-\s|\(?[01]\))",
    re.IGNORECASE,
)

GRADE_WORD = (
    r"(?:final[ _])?(?:grade|score|verdict|rating|answer|decision|judge?ment|conclusion|choice|option|label)"
    r"|[等评評][级級]|[选選][项項]|答案|[结結][论論]|判定|[评評]分|最[终終][评評]分"
)
GRADE_KEY = re.compile(GRADE_WORD, re.IGNORECASE)
