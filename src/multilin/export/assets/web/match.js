// The longest match, beside the graph.

/**
 * What followed the longest earlier occurrence of the last tokens, for each new token: predicted ids and lengths.
 * `ring` has the earlier tokens as ids + 1, token number n in slot n mod slots, and 0 where there is none.
 */
export function longestMatches(ring, numRead, ids, columns, {window, longest}) {
  const slots = ring.length, text = new Int32Array(slots + ids.length);
  for (let slot = 0; slot < slots; slot++) text[slot] = ring[(numRead + slot) % slots];
  text.set(ids.map(id => id + 1), slots);
  const predicted = Array(columns).fill(0), length = Array(columns).fill(0);
  ids.forEach((_, token) => {
    const now = slots + token, lowest = Math.max(now - window, 0);
    for (let place = now - 1; place >= lowest && length[token] < longest; place--) {
      const most = Math.min(longest, place - lowest + 1);
      let size = 0;
      while (size < most && text[place - size] && text[place - size] === text[now - size]) size++;
      if (size > length[token]) (length[token] = size), (predicted[token] = text[place + 1] - 1);
    }
  });
  return [predicted, length];
}
