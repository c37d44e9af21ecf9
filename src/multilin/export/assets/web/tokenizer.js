// Text as tokens and back, exactly as the tokenizers library of `multilin generate` does it. From @huggingface/tokenizers
// (tokenizers.min.mjs, Apache 2.0) come the merges and the translation of patterns; its other parts differ in rare text.
import {BPE, SplitPreTokenizer} from "./tokenizers.min.mjs";

const WORDS = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"; // GPT-2's
const CONTEXT = 8; // tokens before a text that can matter to how it is decoded
const UTF8 = new TextEncoder(), FROM_UTF8 = new TextDecoder("utf-8", {ignoreBOM: true});
// The bytes at an end to which more can come, after the Unicode standard's table of well-formed UTF-8.
const UNFINISHED = new RegExp("(?:[\xc2-\xf4]|\xe0[\xa0-\xbf]|\xed[\x80-\x9f]|[\xe1-\xec\xee\xef][\x80-\xbf]"
  + "|(?:\xf0[\x90-\xbf]|[\xf1-\xf3][\x80-\xbf]|\xf4[\x80-\x8f])[\x80-\xbf]?)$");

// Byte-level vocabularies write bytes as characters: printable ones as themselves, the others from U+0100 on.
const isPrintable = byte => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
let others = 256;
const CHARACTERS = Array.from({length: 256}, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : others++));
const BYTES = new Map(CHARACTERS.map((character, byte) => [character, byte]));

const characters = ranges => new RegExp(`[${ranges.replace(/\w+/g, "\\u{$&}").replace(/\s/g, "")}]`, "gu");
// In Unicode 17, but not in 16, whose properties the library has; U+0295 was a lower-case letter.
const NEW = characters(`
  295 88f c5c cdc 1acf-1add 1ae0-1aeb 20c1 2b96 a7ce-a7cf a7d2 a7d4 a7f1 fbc3-fbd2 fd90-fd91 fdc8-fdce 10940-10959
  10ec5-10ec7 10ed0-10ed8 10efa-10efb 11b60-11b67 11db0-11ddb 11de0-11de9 16ea0-16eb8 16ebb-16ed3 16ff2-16ff6
  187f8-187ff 18d09-18d1e 18d80-18df2 1ccfa-1ccfc 1ceba-1ced0 1cee0-1cef0 1e6c0-1e6de 1e6e0-1e6f5 1e6fe-1e6ff 1f6d8
  1f777-1f77a 1f8d0-1f8d8 1fa54-1fa57 1fa8a 1fa8e 1fac8 1facd 1faea 1faef 1fbfa 2b73a-2b73f 2cea2-2cead 323b0-33479`);
// Composed or reordered by browsers, but not by the library.
const NOT_COMPOSED = characters(`
  7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1add 1ae0-1aeb 1df6-1dfa a82c 105c9 105d2 105da
  105e4 10d24-10d27 10d69-10d6d 10eab-10eac 10efa-10efb 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b 11382-11385
  1138b 1138e 11390-11391 113c2 113c5 113c7-113c8 113ce-113d0 1145e 11839-1183a 11935 11938 1193d-1193e 11943 119e0 11a34
  11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 1611e 16121-16129 1612f 16d63 16d67-16d6a 16ff0-16ff1 1e08f 1e130-1e136
  1e2ae 1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef 1e6e3 1e6e6 1e6ee-1e6ef 1e6f5`);
/** The text for patterns: a new character becomes an unassigned one of the same length. */
const known = text => text.replace(NEW, c => (c === "\u0295" ? "\u0250" : c.length === 1 ? "\uffff" : "\u{10ffff}"));

/** A pattern of a tokenizer.json as a function that cuts a text: [[part, whether it is a match], ...]. */
function cutter({String: text, Regex: pattern}) {
  if (text !== undefined) return whole => cut(whole, whole.matchAll(new RegExp(quoted(text), "gu")));
  const Regex = pattern.replaceAll("(?i:'s|", "(?i:'[sſ]|"); // without regard to case, ſ is an s
  const {pattern: expression} = new SplitPreTokenizer({pattern: {Regex}, invert: false});
  return whole => cut(whole, known(whole).matchAll(expression));
}
const quoted = text => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");

function cut(text, matches) {
  const parts = [];
  let end = 0;
  const add = (to, isMatch) => (to > end && parts.push([text.slice(end, to), isMatch]), (end = to));
  for (const {0: match, index} of matches) add(index, false), add(index + match.length, true);
  add(text.length, false);
  return parts;
}

const JOINED = { // whether a part is joined to the one before it; each is a match or not
  Isolated: () => false,
  Removed: () => false,
  Contiguous: (before, is) => before === is,
  MergedWithPrevious: (before, is) => is && !before,
  MergedWithNext: (before, is) => before && !is,
};

/** The words of parts; a removed part is "". */
function split(parts, behavior, invert = false) {
  const words = [];
  parts.forEach(([part, isMatch], i) => {
    const is = isMatch !== invert, before = i > 0 && parts[i - 1][1] !== invert;
    if (i > 0 && JOINED[behavior](before, is)) words.push(words.pop() + part);
    else words.push(behavior === "Removed" && is ? "" : part);
  });
  return words;
}

// Each takes its settings and gives a function of a text. `follows`: the text follows other text, so that no space is
// put before it; `isFirst`: it begins the whole text.
const NORMALIZERS = {
  NFC: () => text =>
    cut(text, text.matchAll(NOT_COMPOSED)).map(([part, isNew]) => (isNew ? part : part.normalize("NFC"))).join(""),
  Lowercase: () => text => Array.from(text, character => character.toLowerCase()).join(""),
  Prepend: ({prepend}) => (text, {follows}) => (text && !follows ? prepend + text : text),
  Replace: ({pattern, content}) => replacer(pattern, content),
};
function replacer(pattern, content) {
  const parts = cutter(pattern);
  return text => parts(text).map(([part, isMatch]) => (isMatch ? content : part)).join("");
}

const PRE_TOKENIZERS = {
  ByteLevel: ({add_prefix_space, use_regex}) => {
    const words = cutter({Regex: WORDS});
    const bytes = word => Array.from(UTF8.encode(word), byte => CHARACTERS[byte]).join("");
    return (text, {follows}) => {
      const whole = add_prefix_space && !follows && !text.startsWith(" ") ? ` ${text}` : text;
      return (use_regex ? split(words(whole), "Isolated") : [whole]).map(bytes);
    };
  },
  Digits: ({individual_digits}) => text =>
    split(cut(text, text.matchAll(/\p{N}/gu)), individual_digits ? "Isolated" : "Contiguous"),
  Metaspace: ({replacement, prepend_scheme, split: isSplit}) => {
    const spaces = cutter({String: replacement});
    return (text, {follows, isFirst}) => {
      const spaced = text.replaceAll(" ", replacement);
      const isBegun = !follows && (prepend_scheme === "always" || (prepend_scheme === "first" && isFirst));
      const whole = isBegun && !spaced.startsWith(replacement) ? replacement + spaced : spaced;
      return isSplit ? split(spaces(whole), "MergedWithNext") : [whole];
    };
  },
  Split: ({pattern, behavior, invert}) => {
    const parts = cutter(pattern);
    return text => split(parts(text), behavior, invert);
  },
  WhitespaceSplit: () => text => split(cut(text, text.matchAll(/\p{White_Space}/gu)), "Removed"),
};

// Each takes its settings and gives a function from a word to ids.
const MODELS = {
  BPE: model => {
    const bpe = new BPE(model), ids = bpe.tokens_to_ids, hasNone = model.unk_token === null && !model.byte_fallback;
    const kept = word => (hasNone ? Array.from(word).filter(character => ids.has(character)).join("") : word);
    return word => bpe([model.ignore_merges && ids.has(word) ? word : kept(word)]).map(token => ids.get(token));
  },
  Unigram: ({vocab, unk_id, byte_fallback}) => {
    const ids = new Map(vocab.map(([piece], id) => [piece, id])), scores = vocab.map(([, score]) => score);
    const longest = vocab.reduce((most, [piece]) => Math.max(most, piece.length), 0);
    const unknown = scores.reduce((least, score) => Math.min(least, score)) - 10;
    const spelled = piece => {
      const bytes = Array.from(UTF8.encode(piece), byte => ids.get(byteName(byte)));
      return byte_fallback && !bytes.includes(undefined) ? bytes : [unk_id];
    };
    /** The likeliest pieces; unknown characters in a row are one. */
    const pieces = word => {
      const best = [{score: 0}], found = []; // up to each place: the score, and start and id of the last piece
      const offer = (end, score, start, id) => {
        if (!(score <= best[end]?.score)) best[end] = {score, start, id};
      };
      for (let start = 0, next; start < word.length; start = next) {
        const {score} = best[start];
        next = start + String.fromCodePoint(word.codePointAt(start)).length;
        for (let end = next; end <= Math.min(start + longest, word.length); end++) {
          const id = ids.get(word.slice(start, end));
          if (id !== undefined) offer(end, score + scores[id], start, id);
        }
        if (!ids.has(word.slice(start, next))) offer(next, score + unknown, start, unk_id);
      }
      for (let end = word.length, after; end > 0; end = best[end].start) {
        const {start, id} = best[end], piece = word.slice(start, end);
        found.push(id === unk_id && after === unk_id ? piece + found.pop() : piece);
        after = id;
      }
      return found.reverse();
    };
    return word => pieces(word).flatMap(piece => ids.get(piece) ?? spelled(piece));
  },
  WordLevel: ({vocab, unk_token}) => {
    const ids = new Map(Object.entries(vocab));
    return word => [ids.get(word) ?? ids.get(unk_token)];
  },
};
const byteName = byte => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`;
const isByteName = name => /^<0x[\da-f]{2}>$/i.test(name);

// Each takes its settings and gives a function from tokens to tokens.
const DECODERS = {
  ByteFallback: () => tokens => {
    const texts = [];
    let bytes = [];
    for (const token of [...tokens, null]) {
      if (token !== null && isByteName(token)) {
        bytes.push(parseInt(token.slice(3, 5), 16));
        continue;
      }
      const text = FROM_UTF8.decode(Uint8Array.from(bytes)); // one byte that is not UTF-8 spoils all bytes in a row
      texts.push(UTF8.encode(text).join() === bytes.join() ? text : "\ufffd".repeat(bytes.length), token ?? "");
      bytes = [];
    }
    return texts;
  },
  ByteLevel: () => tokens => [FROM_UTF8.decode(Uint8Array.from(tokens.flatMap(levelBytes)))],
  Fuse: () => tokens => [tokens.join("")],
  Metaspace: ({replacement, prepend_scheme}) => tokens =>
    tokens.map((token, i) => token.replaceAll(replacement, i === 0 && prepend_scheme !== "never" ? "" : " ")),
  Replace: ({pattern, content}) => {
    const replace = replacer(pattern, content);
    return tokens => tokens.map(replace);
  },
  Strip: ({content, start}) => tokens => tokens.map(token => {
    let cut = 0;
    while (cut < start * content.length && token.startsWith(content, cut)) cut += content.length;
    return token.slice(cut);
  }),
};
function levelBytes(token) {
  const bytes = Array.from(token, character => BYTES.get(character));
  return bytes.includes(undefined) ? Array.from(UTF8.encode(token)) : bytes;
}

/** The parts of a sequence of normalizers, pre-tokenizers or decoders. */
function flat(part) {
  if (part?.type === "Sequence") return Object.values(part).find(Array.isArray).flatMap(flat);
  return part ? [part] : [];
}
const made = (kinds, part) => flat(part).map(each => kinds[each.type](each));

/** A function that cuts a text at the added tokens that it spells out, but names of special tokens are text. */
function finder(tokens, normal = name => name) {
  const found = new Map(tokens.map(token => [normal(token.content), token]));
  const names = [...found.keys()].sort((a, b) => b.length - a.length);
  const pattern = new RegExp(names.map(quoted).join("|") || "(?!)", "gu");
  return text => cut(text, [...text.matchAll(pattern)].filter(([name]) => !found.get(name).special))
    .map(([part, isMatch], i) => [part, isMatch ? found.get(part).id : undefined, i === 0]);
}

/** A model in which special tokens have names that no text has, so that text never becomes one. */
function withoutNames(model, special) {
  if (model.type === "BPE" && !model.ignore_merges) return model; // no merge makes one
  const names = new Map(special.map(({content, id}) => [content, `\ud800${id}`]));
  const renamed = name => names.get(name) ?? name, {vocab, merges = []} = model;
  return {
    ...model, unk_token: renamed(model.unk_token),
    vocab: Array.isArray(vocab) ? vocab.map(([name, score]) => [renamed(name), score])
      : Object.fromEntries(Object.entries(vocab).map(([name, id]) => [renamed(name), id])),
    merges: merges.filter(([left, right]) => ![left, right, left + right].some(name => names.has(name))),
  };
}

export class TextCodec {
  constructor(content) {
    const {model, added_tokens: added} = content;
    this.names = [];
    if (model.type === "Unigram") model.vocab.forEach(([name], id) => (this.names[id] = name));
    else for (const [name, id] of Object.entries(model.vocab)) this.names[id] = name;
    const special = added.filter(token => token.special);
    this.special = new Set(special.map(token => token.id));
    this.normalizers = made(NORMALIZERS, content.normalizer);
    this.preTokenizers = made(PRE_TOKENIZERS, content.pre_tokenizer);
    this.model = MODELS[model.type](withoutNames(model, special));
    this.decoders = content.decoder && made(DECODERS, content.decoder);
    this.decoderTypes = flat(content.decoder).map(part => part.type);
    // Where spaces are dropped, the space that is put before a piece replaces them.
    this.dropsSpaces = Boolean(content.pre_tokenizer?.pretokenizers?.some(part => part.type === "WhitespaceSplit"));
    for (const {content: name, id, normalized} of added) this.names[id] = normalized ? this.#normal(name, {}) : name;
    this.added = finder(added.filter(token => !token.normalized));
    this.addedNormal = [false, true].map(follows =>
      finder(added.filter(token => token.normalized), name => this.#normal(name, {follows})));
  }

  get numTokens() {
    return this.names.length;
  }

  #normal(text, place) {
    return this.normalizers.reduce((each, normalize) => normalize(each, place), text);
  }

  /** The tokens of a text. If it follows other text, no space is put before it. */
  encode(text, follows = false) {
    const ids = [], place = {follows: follows && !this.dropsSpaces};
    for (const [part, id, isFirst] of this.added(text)) {
      if (id !== undefined) ids.push(id);
      else for (const [piece, id, begins] of this.addedNormal[+place.follows](this.#normal(part, place))) {
        if (id !== undefined) ids.push(id);
        else for (const word of this.#words(piece, {...place, isFirst: isFirst && begins}))
          for (const token of this.model(word)) ids.push(token);
      }
    }
    return ids;
  }

  #words(text, {follows, isFirst}) {
    let words = [[text, isFirst]];
    for (const preTokenize of this.preTokenizers)
      words = words.flatMap(([word, isFirst]) =>
        preTokenize(word, {follows, isFirst}).map((each, i) => [each, isFirst && i === 0])).filter(([word]) => word);
    return words.map(([word]) => word);
  }

  decode(ids) {
    const tokens = ids.filter(id => !this.special.has(id) && this.names[id] !== undefined).map(id => this.names[id]);
    return this.decoders ? this.decoders.reduce((each, decode) => decode(each), tokens).join("") : tokens.join(" ");
  }

  /** The text of tokens, without an unfinished character at its end. */
  wholeText(ids) {
    const cut = this.#numUnfinished(ids);
    if (!cut) return this.decode(ids);
    // Tokens of one byte would make the others unreadable.
    return this.#isFallback(ids.at(-1)) ? this.decode(ids.slice(0, -cut)) : this.decode(ids).slice(0, -1);
  }

  /** True if no later token changes the text of these: a character is whole, and a run of bytes has ended. */
  isCertain(ids) {
    return !this.#isFallback(ids.at(-1)) && !this.#numUnfinished(ids);
  }

  /** The number of bytes at the end that begin a character. */
  #numUnfinished(ids) {
    if (!(this.#bytes(ids.at(-1)).at(-1) > 127)) return 0;
    const end = String.fromCharCode(...ids.slice(-3).flatMap(id => this.#bytes(id)));
    return UNFINISHED.exec(end)?.[0].length ?? 0;
  }

  #bytes(id) {
    const name = this.names[id] ?? "";
    if (this.#isFallback(id)) return [parseInt(name.slice(3, 5), 16)];
    return this.decoderTypes.includes("ByteLevel") ? levelBytes(name) : Array.from(UTF8.encode(name));
  }

  /** True for a byte of a SentencePiece vocabulary: one byte that is not UTF-8 spoils all bytes in a row. */
  #isFallback(id) {
    return this.decoderTypes.includes("ByteFallback") && isByteName(this.names[id] ?? "");
  }
}

/** Turns tokens into pieces of text that later tokens cannot change, as `multilin.inference.text.TextStream` does. */
export class TextStream {
  constructor(codec, context = []) {
    const kept = context.filter(id => !codec.special.has(id));
    let start = Math.max(kept.length - CONTEXT, 0);
    // Half a character, or no text, would spoil what some tokenizers decode after it.
    const isSafe = () => codec.isCertain(kept.slice(Math.max(start - 3, 0), start)) && codec.wholeText(kept.slice(start));
    while (start && !isSafe()) start--;
    Object.assign(this, {codec, ids: kept.slice(start), numCertain: 0, numShown: 0});
    this.end();
  }

  /** The new text that is certain after one more token, often none. */
  put(id) {
    const {codec} = this;
    if (!codec.special.has(id)) this.ids.push(id);
    if (!codec.isCertain(this.ids)) return "";
    const news = this.end(), last = this.ids.slice(this.numCertain), text = codec.wholeText(last);
    if (this.ids.length > 2 * CONTEXT && text) [this.ids, this.numShown] = [last, [...text].length];
    this.numCertain = this.ids.length;
    return news;
  }

  /** The rest of the text, at the end, without an unfinished character; a stream with this context gives the whole. */
  end() {
    const text = [...this.codec.wholeText(this.ids)], news = text.slice(this.numShown);
    this.numShown = text.length; // in code points, as in Python
    return news.join("");
  }
}
