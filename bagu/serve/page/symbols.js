// The TeX commands for single symbols, used by `tex.js`. Every table maps names to characters.

/** "alpha α beta β" as an object. */
function table(...lines) {
  const words = lines.join(" ").trim().split(/\s+/);
  return Object.fromEntries(words.flatMap((word, at) => (at % 2 ? [] : [[word, words[at + 1]]])));
}

/** Letters: an identifier (<mi>), italic. */
export const LETTERS = table(
  "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ",
  "mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ",
  "psi ψ omega ω ell ℓ imath ı jmath ȷ",
);

/** Letters and symbols that are upright. */
export const UPRIGHT = table(
  "Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇",
  "emptyset ∅ varnothing ∅ hbar ℏ Re ℜ Im ℑ aleph ℵ wp ℘ angle ∠ triangle △ square □ blacksquare ■ degree °",
  "top ⊤ bot ⊥ ldots … dots … dotsc … cdots ⋯ dotsb ⋯ dotsm ⋯ vdots ⋮ ddots ⋱ dagger † ddagger ‡ star ⋆ prime ′",
  "checkmark ✓ S § P ¶ pounds £ copyright ©",
);

/** Operators and relations: <mo>. */
export const OPERATORS = table(
  "pm ± mp ∓ times × div ÷ cdot ⋅ ast ∗ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ oslash ⊘ odot ⊙ cup ∪ cap ∩",
  "uplus ⊎ sqcup ⊔ sqcap ⊓ vee ∨ lor ∨ wedge ∧ land ∧ neg ¬ lnot ¬ setminus ∖ smallsetminus ∖ wr ≀ amalg ⨿",
  "leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ ll ≪ gg ≫ lt < gt > equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ asymp ≍",
  "doteq ≐ triangleq ≜ coloneqq ≔ prec ≺ succ ≻ preceq ⪯ succeq ⪰ lesssim ≲ gtrsim ≳ leqslant ⩽ geqslant ⩾",
  "in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ supsetneq ⊋ nsubseteq ⊈ mid ∣ nmid ∤",
  "parallel ∥ perp ⊥ models ⊨ vdash ⊢ dashv ⊣ forall ∀ exists ∃ nexists ∄ therefore ∴ because ∵ colon :",
  "to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹",
  "impliedby ⟸ iff ⟺ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ Longleftarrow ⟸ Longleftrightarrow ⟺",
  "mapsto ↦ longmapsto ⟼ hookrightarrow ↪ uparrow ↑ downarrow ↓ updownarrow ↕ Uparrow ⇑ Downarrow ⇓ nearrow ↗",
  "searrow ↘ swarrow ↙ nwarrow ↖ rightharpoonup ⇀ rightleftharpoons ⇌ leadsto ⇝ lhd ⊲ rhd ⊳",
);

/** Large operators; in a displayed formula, limits are above and below. */
export const LARGE = table(
  "sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ bigvee ⋁ bigwedge ⋀ biguplus ⨄ bigsqcup ⨆",
);

/** Integrals; their limits are at the right. */
export const INTEGRALS = table("int ∫ iint ∬ iiint ∭ oint ∮ oiint ∯");

/** Upright function names, and those of them whose subscript is below in a displayed formula. */
export const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp arg deg dim hom ker".split(" "),
);
export const LIMITS = new Set("lim max min sup inf det gcd Pr limsup liminf argmax argmin".split(" "));

/** Delimiters for \left, \right and \big, in addition to single characters. */
export const DELIMITERS = table(
  "{ { } } lbrace { rbrace } | ‖ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lvert | rvert | vert | lVert ‖",
  "rVert ‖ Vert ‖ lbrack [ rbrack ] backslash \\ uparrow ↑ downarrow ↓ lgroup ⟮ rgroup ⟯",
);

/** Accents over (or under) the argument. Stretched ones cover all of it. */
export const ACCENTS = table(
  "hat ^ widehat ^ bar ¯ tilde ~ widetilde ~ vec → dot ˙ ddot ¨ dddot ⃛ check ˇ breve ˘ acute ´ grave ` mathring ˚",
  "overrightarrow → overleftarrow ←",
);
export const UNDER = table("underrightarrow → underleftarrow ←");
export const STRETCHED = new Set(
  "widehat widetilde overrightarrow overleftarrow underrightarrow underleftarrow".split(" "),
);

/** Arrows with text above. */
export const ARROWS = table("xrightarrow → xleftarrow ← xRightarrow ⇒ xLeftarrow ⇐ xleftrightarrow ↔ xmapsto ↦");

/** Widths of spaces, in em. */
export const SPACES = {
  ",": 0.167, ":": 0.222, ">": 0.222, ";": 0.278, "!": -0.167, " ": 0.25, "~": 0.25, thinspace: 0.167, medspace: 0.222,
  thickspace: 0.278, negthinspace: -0.167, enspace: 0.5, quad: 1, qquad: 2, space: 0.25, nobreakspace: 0.25,
};

/** The delimiters around a matrix. */
export const MATRICES = {
  matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"],
  vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], array: ["", ""], cases: ["{", ""], dcases: ["{", ""], rcases: ["", "}"],
};

/** Environments whose lines are aligned at "&", or centred. */
export const LINES = new Set("aligned align alignedat alignat split eqnarray".split(" "));
export const CENTRED = new Set("gathered gather equation multline".split(" "));

// The first letters (A and a) of Unicode's "Mathematical Alphanumeric Symbols"; letters that Unicode had before have
// other code points.
export const ALPHABETS = {
  mathbb: { upper: 0x1d538, lower: 0x1d552, digit: 0x1d7d8, other: table("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ") },
  mathcal: { upper: 0x1d49c, lower: 0x1d4b6, other: table("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ") },
  mathfrak: { upper: 0x1d504, lower: 0x1d51e, other: table("C ℭ H ℌ I ℑ R ℜ Z ℨ") },
};
ALPHABETS.mathscr = ALPHABETS.mathcal;
