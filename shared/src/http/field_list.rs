//! The header fields of a message, in order.

use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Header or trailer fields in their order of arrival, as every hop of a relayed message handles
/// them.
///
/// A list, and not the hash table of [`HeaderMap`]: a head has about ten fields, and most are only
/// copied to the next hop. Lookups compare names one after another, so the number of fields must be
/// bounded ([`HeadLimits`](super::limits::HeadLimits)). A `HeaderMap` moves fields of one name
/// together; this list keeps their places.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields(Vec<(HeaderName, HeaderValue)>);

impl Fields {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// An empty list with room for `capacity` fields.
    pub fn with_capacity(capacity: usize) -> Self {
        Self(Vec::with_capacity(capacity))
    }

    /// An empty list with room for the `received` fields of a message, and for those that an
    /// intermediary adds.
    pub fn with_room_for(received: usize) -> Self {
        const ADDED: usize = 8;
        Self::with_capacity(received + ADDED)
    }

    /// Number of fields. Several fields of one name count separately.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// First value of the fields with this name.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "a name, a reference to one, or a string, as for `HeaderMap`"
    )]
    pub fn get<N>(&self, name: N) -> Option<&HeaderValue>
    where
        HeaderName: PartialEq<N>,
    {
        self.iter()
            .find(|(field, _)| **field == name)
            .map(|(_, value)| value)
    }

    /// Values of all fields with this name, in order.
    pub fn get_all<N>(&self, name: N) -> impl DoubleEndedIterator<Item = &HeaderValue>
    where
        HeaderName: PartialEq<N>,
    {
        self.iter()
            .filter(move |(field, _)| **field == name)
            .map(|(_, value)| value)
    }

    pub fn contains<N>(&self, name: N) -> bool
    where
        HeaderName: PartialEq<N>,
    {
        self.get(name).is_some()
    }

    /// Adds a field behind all others.
    pub fn append(&mut self, name: HeaderName, value: HeaderValue) {
        self.0.push((name, value));
    }

    /// Replaces all fields with this name by one, at the place of the first; without one, adds the
    /// field at the end.
    pub fn insert(&mut self, name: HeaderName, value: HeaderValue) {
        let Some(at) = self.0.iter().position(|(field, _)| *field == name) else {
            return self.append(name, value);
        };
        self.0[at].1 = value;
        let mut place = 0;
        self.0.retain(|(field, _)| {
            place += 1;
            place <= at + 1 || *field != name
        });
    }

    /// Frees the memory of removed fields.
    pub fn shrink_to_fit(&mut self) {
        self.0.shrink_to_fit();
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Removes all fields with this name and returns the first value.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "a name, a reference to one, or a string, as for `HeaderMap`"
    )]
    pub fn remove<N>(&mut self, name: N) -> Option<HeaderValue>
    where
        HeaderName: PartialEq<N>,
    {
        let at = self.0.iter().position(|(field, _)| *field == name)?;
        let (_, value) = self.0.remove(at);
        self.0.retain(|(field, _)| *field != name);
        Some(value)
    }

    /// Keeps a field if `keep` returns true for its name.
    pub fn retain(&mut self, mut keep: impl FnMut(&HeaderName) -> bool) {
        self.0.retain(|(name, _)| keep(name));
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&HeaderName, &HeaderValue)> {
        self.0.iter().map(|(name, value)| (name, value))
    }

    pub fn values(&self) -> impl Iterator<Item = &HeaderValue> {
        self.0.iter().map(|(_, value)| value)
    }

    /// Names in order, repeated names too.
    pub fn names(&self) -> impl Iterator<Item = &HeaderName> {
        self.0.iter().map(|(name, _)| name)
    }
}

impl<N> std::ops::Index<N> for Fields
where
    HeaderName: PartialEq<N>,
{
    type Output = HeaderValue;

    /// Panics if there is no such field.
    fn index(&self, name: N) -> &HeaderValue {
        let at = self.0.iter().position(|(field, _)| *field == name);
        &self.0[at.unwrap_or(self.len())].1
    }
}

impl IntoIterator for Fields {
    type Item = (HeaderName, HeaderValue);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl FromIterator<(HeaderName, HeaderValue)> for Fields {
    fn from_iter<I: IntoIterator<Item = (HeaderName, HeaderValue)>>(fields: I) -> Self {
        Self(Vec::from_iter(fields))
    }
}

impl Extend<(HeaderName, HeaderValue)> for Fields {
    fn extend<I: IntoIterator<Item = (HeaderName, HeaderValue)>>(&mut self, fields: I) {
        self.0.extend(fields);
    }
}

/// From the map of a library. Its fields of one name follow each other.
impl From<HeaderMap> for Fields {
    fn from(map: HeaderMap) -> Self {
        let mut fields = Self::with_room_for(map.len());
        let mut named = None;
        for (name, value) in map {
            // Further values of a field come without its name.
            named = name.or(named);
            if let Some(name) = &named {
                fields.append(name.clone(), value);
            }
        }
        fields
    }
}

/// For a library that takes a map. HPACK encoders keep values beyond their message, in the table of
/// the connection (RFC 7541 §2.3.2). So the values of a large message are copied: one of them would
/// keep all bytes that it arrived in.
impl From<Fields> for HeaderMap {
    fn from(fields: Fields) -> Self {
        /// Bytes of values from which on they are copied.
        const LARGE: usize = 1024;
        let is_large = fields.values().map(HeaderValue::len).sum::<usize>() >= LARGE;
        let mut map = Self::with_capacity(fields.len());
        for (name, value) in fields {
            map.append(name, if is_large { detached(&value) } else { value });
        }
        map
    }
}

/// A copy of the value, which keeps no other bytes of its message.
fn detached(value: &HeaderValue) -> HeaderValue {
    // Never fails: the bytes are those of a value.
    let mut copy = HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone());
    copy.set_sensitive(value.is_sensitive());
    copy
}

#[cfg(test)]
mod tests {
    use http::header::{ACCEPT, COOKIE, HOST};

    use super::*;
    use crate::testing::fields;

    #[test]
    fn fields_keep_their_order_and_their_places() {
        let mut list = fields(&[("accept", "1"), ("x-a", "2"), ("accept", "3")]);
        list.append(COOKIE, HeaderValue::from_static("4"));
        let seen = list
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap()));
        assert!(seen.eq([
            ("accept", "1"),
            ("x-a", "2"),
            ("accept", "3"),
            ("cookie", "4")
        ]));
        assert_eq!(list.get(ACCEPT).unwrap(), "1");
        assert_eq!(list.get_all("Accept").collect::<Vec<_>>(), ["1", "3"]);
        assert_eq!(list.get_all(&ACCEPT).next_back().unwrap(), "3");
        assert!(list.contains("X-A") && !list.contains(HOST));
        assert_eq!(list.len(), 4);
        assert_eq!(list["x-a"], "2");
    }

    #[test]
    fn an_inserted_field_takes_the_place_of_the_first() {
        let mut list = fields(&[
            ("accept", "1"),
            ("x-a", "2"),
            ("x-b", "3"),
            ("x-a", "4"),
            ("x-a", "5"),
        ]);
        let name = HeaderName::from_static("x-a");
        list.insert(name, HeaderValue::from_static("6"));
        assert_eq!(list, fields(&[("accept", "1"), ("x-a", "6"), ("x-b", "3")]));
        list.insert(HOST, HeaderValue::from_static("7"));
        let expected = [("accept", "1"), ("x-a", "6"), ("x-b", "3"), ("host", "7")];
        assert_eq!(list, fields(&expected));
    }

    #[test]
    fn all_fields_of_a_removed_name_are_gone() {
        let mut list = fields(&[("x-a", "1"), ("accept", "2"), ("x-a", "3")]);
        assert_eq!(list.remove("x-a").unwrap(), "1");
        assert_eq!(list, fields(&[("accept", "2")]));
        assert_eq!(list.remove("x-a"), None);
        list.retain(|name| *name != ACCEPT);
        assert!(list.is_empty());
    }

    #[test]
    fn maps_convert_in_both_directions() {
        let map: HeaderMap = fields(&[("x-a", "1"), ("accept", "2"), ("x-a", "3")]).into();
        assert_eq!(map.get_all("x-a").iter().collect::<Vec<_>>(), ["1", "3"]);
        let list = Fields::from(map);
        assert_eq!(list, fields(&[("x-a", "1"), ("x-a", "3"), ("accept", "2")]));
    }

    #[test]
    fn a_map_keeps_no_bytes_of_a_large_message() {
        for (size, is_copied) in [(1000, false), (1100, true)] {
            let message = bytes::Bytes::from(vec![b'v'; size]);
            let value = |part| HeaderValue::from_maybe_shared(message.slice(part)).unwrap();
            let list = Fields::from_iter([(ACCEPT, value(0..10)), (HOST, value(10..size))]);
            let map = HeaderMap::from(list.clone());
            let place = |value: &HeaderValue| value.as_bytes().as_ptr();
            for (name, value) in list.iter() {
                assert_eq!(map[name], *value);
                assert_eq!(place(&map[name]) != place(value), is_copied, "{size}");
            }
        }
    }

    #[test]
    fn a_map_keeps_what_is_sensitive() {
        let mut secret = HeaderValue::from_maybe_shared("s".repeat(2000)).unwrap();
        secret.set_sensitive(true);
        let map = HeaderMap::from(Fields::from_iter([(COOKIE, secret)]));
        assert!(map[COOKIE].is_sensitive());
    }
}
