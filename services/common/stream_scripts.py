"""The Lua scripts of a stream. Each is atomic: byte counts and deduplication marks never disagree with the entries.

An entry has the fields `p` (payload) and `k` (deduplication key). Accounted bytes are those of the payload and the key.
The state hash holds: bytes (of the entries in the stream), closed (1 between reaching the high mark and falling to
the low one), dead_bytes (of the dead letters) and dead_dropped (dead letters lost to their bound).
"""

PUBLISHED, DUPLICATE, FULL = 1, 0, -1
FENCED = -1
MISSING = -2

# KEYS: stream, dedup, state. ARGV: payload, key, max entries, max bytes, low entries, low bytes.
# Returns {status, entry id or "", entries, bytes}. Entries in the stream are those not yet acknowledged: an
# acknowledgement deletes. Hence nothing is trimmed here, ever.
PUBLISH = """
local known = redis.call('HGET', KEYS[2], ARGV[2])
local count = redis.call('XLEN', KEYS[1])
local state = redis.call('HMGET', KEYS[3], 'bytes', 'closed')
local bytes = tonumber(state[1] or '0')
if known then return {0, known, count, bytes} end
local size = #ARGV[1] + #ARGV[2]
if state[2] == '1' then
  if count > tonumber(ARGV[5]) or bytes > tonumber(ARGV[6]) then return {-1, '', count, bytes} end
  redis.call('HSET', KEYS[3], 'closed', '0')
end
if count + 1 > tonumber(ARGV[3]) or bytes + size > tonumber(ARGV[4]) then
  redis.call('HSET', KEYS[3], 'closed', '1')
  return {-1, '', count, bytes}
end
local id = redis.call('XADD', KEYS[1], '*', 'p', ARGV[1], 'k', ARGV[2])
redis.call('HSET', KEYS[2], ARGV[2], id)
redis.call('HINCRBY', KEYS[3], 'bytes', size)
return {1, id, count + 1, bytes + size}
"""

# Forgets one entry whole. Called with: id, size, key.
_REMOVE = """
local function remove(id, size, key)
  redis.call('XACK', KEYS[1], group, id)
  if redis.call('XDEL', KEYS[1], id) == 0 then return 0 end
  redis.call('HINCRBY', KEYS[3], 'bytes', -size)
  if redis.call('HGET', KEYS[2], key) == id then redis.call('HDEL', KEYS[2], key) end
  return 1
end
"""

# A holder that lost its lock must not change the queue: its successor has taken the entries over.
_FENCE = """
local group, token = ARGV[1], ARGV[2]
if token ~= '' and redis.call('GET', KEYS[4]) ~= token then return -1 end
"""

# KEYS: stream, dedup, state, lock. ARGV: group, lock token or "", then id, size, key for each entry.
# Returns how many were still there, or -1 where the lock is not the caller's.
ACK = (
    _FENCE
    + _REMOVE
    + """
local removed = 0
for i = 3, #ARGV, 3 do removed = removed + remove(ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]) end
return removed
"""
)

# KEYS: stream, dedup, state, lock, dead. ARGV: group, token, id, reason, deliveries, max dead entries, max dead bytes.
# Returns the dead letter's id, "" where the entry is gone, -1 where the lock is not the caller's.
# The oldest dead letters make room for new ones: counted, because nobody may have looked at them.
DEAD_LETTER = (
    _FENCE
    + _REMOVE
    + """
local found = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])
if #found == 0 then
  redis.call('XACK', KEYS[1], group, ARGV[3])
  return ''
end
local payload, key = found[1][2][2], found[1][2][4]
local dead = redis.call('XADD', KEYS[5], '*', 'p', payload, 'k', key, 'reason', ARGV[4], 'deliveries', ARGV[5],
                        'origin', ARGV[3])
remove(ARGV[3], #payload + #key, key)
redis.call('HINCRBY', KEYS[3], 'dead_bytes', #payload + #key)
while redis.call('XLEN', KEYS[5]) > tonumber(ARGV[6])
    or tonumber(redis.call('HGET', KEYS[3], 'dead_bytes')) > tonumber(ARGV[7]) do
  local oldest = redis.call('XRANGE', KEYS[5], '-', '+', 'COUNT', 1)[1]
  redis.call('XDEL', KEYS[5], oldest[1])
  redis.call('HINCRBY', KEYS[3], 'dead_bytes', -(#oldest[2][2] + #oldest[2][4]))
  redis.call('HINCRBY', KEYS[3], 'dead_dropped', 1)
end
return dead
"""
)

# KEYS: stream, dedup, state, dead. ARGV: dead letter's id, max entries, max bytes.
# Returns {status, entry id or ""}: published, duplicate, full, or missing as -2.
REQUEUE = """
local found = redis.call('XRANGE', KEYS[4], ARGV[1], ARGV[1])
if #found == 0 then return {-2, ''} end
local payload, key = found[1][2][2], found[1][2][4]
local known = redis.call('HGET', KEYS[2], key)
if known then return {0, known} end
local size = #payload + #key
if redis.call('XLEN', KEYS[1]) + 1 > tonumber(ARGV[2])
    or tonumber(redis.call('HGET', KEYS[3], 'bytes') or '0') + size > tonumber(ARGV[3]) then return {-1, ''} end
local id = redis.call('XADD', KEYS[1], '*', 'p', payload, 'k', key)
redis.call('HSET', KEYS[2], key, id)
redis.call('HINCRBY', KEYS[3], 'bytes', size)
redis.call('XDEL', KEYS[4], ARGV[1])
redis.call('HINCRBY', KEYS[3], 'dead_bytes', -size)
return {1, id}
"""

# KEYS: stream. ARGV: group, consumer, then ids. Renews those that are still the consumer's; returns the others.
EXTEND = """
local lost = {}
for i = 3, #ARGV do
  -- pcall: a group that is gone has nothing pending
  if #redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
"""

# KEYS: dead, state. ARGV: dead letter's id. Returns 1, or 0 where there is no such.
DROP_DEAD = """
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if #found == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('HINCRBY', KEYS[2], 'dead_bytes', -(#found[1][2][2] + #found[1][2][4]))
return 1
"""

# KEYS: stream. ARGV: group, consumer. Forgets other consumers that hold nothing; one that still lives is known again
# at its next read. In one script, because forgetting a consumer that has just read would lose its entries.
FORGET_IDLE_CONSUMERS = """
local forgotten = 0
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local name, pending
  for i = 1, #consumer, 2 do
    if consumer[i] == 'name' then name = consumer[i + 1] elseif consumer[i] == 'pending' then pending = consumer[i +
    1] end
  end
  if pending == 0 and name ~= ARGV[2] then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], name)
    forgotten = forgotten + 1
  end
end
return forgotten
"""
