//! Strict parsing of JSON in requests: an object with a duplicate member is refused at any depth.
//! RFC 8259 §4 leaves open which of the two counts, so a program in front of the gateway may have
//! read the other one.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Longest member name in an error, in characters.
const SHOWN: usize = 80;

/// Parses `text`, which must be an object, as a `T`.
pub fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, serde_json::Error> {
    let Object(members) = serde_json::from_slice(text)?;
    serde_json::from_value(Value::Object(members))
}

/// An object without duplicate members, at any depth.
#[derive(Debug)]
pub struct Object(pub Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor;

        impl<'de> Visitor<'de> for ObjectVisitor {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map, which is a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<Object, A::Error> {
                unique(members).map(Object)
            }
        }

        deserializer.deserialize_map(ObjectVisitor)
    }
}

/// Any value without duplicate members in its objects.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Self)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(Strict(element)) = elements.next_element()? {
            array.push(element);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<Value, A::Error> {
        unique(members).map(Value::Object)
    }
}

fn unique<'de, A: MapAccess<'de>>(mut members: A) -> Result<Map<String, Value>, A::Error> {
    let mut object = Map::new();
    while let Some(name) = members.next_key::<String>()? {
        if object.contains_key(&name) {
            let shown: String = name.chars().take(SHOWN).collect();
            return Err(A::Error::custom(format_args!("duplicate field `{shown}`")));
        }
        let Strict(value) = members.next_value()?;
        object.insert(name, value);
    }
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(text: &str) -> Result<Map<String, Value>, String> {
        serde_json::from_slice::<Object>(text.as_bytes())
            .map(|object| object.0)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn valid_objects_are_parsed_unchanged() {
        let text = r#"{"a":[1,-2,1.5,true,null,"x\n"],"b":{"a":{"a":18446744073709551615}},"":{}}"#;
        assert_eq!(
            Value::Object(object(text).unwrap()),
            serde_json::from_str::<Value>(text).unwrap()
        );
        assert_eq!(
            parse::<Map<String, Value>>(text.as_bytes()).unwrap(),
            object(text).unwrap()
        );
        for text in ["[]", "null", "1", "\"a\"", "", "{", "{}{}", "{\"a\":1e999}"] {
            assert!(object(text).is_err(), "{text}");
        }
        assert!(
            object("[{}]")
                .unwrap_err()
                .contains("expected a map, which is a JSON object")
        );
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(object(&deep).unwrap_err().contains("recursion limit"));
    }

    #[test]
    fn duplicate_members_are_refused_by_name_at_any_depth() {
        for text in [
            r#"{"name":1,"name":1}"#,
            r#"{"a":1,"name":null,"b":2,"\u006eame":"x"}"#,
            r#"{"a":{"b":[0,{"name":{},"name":{}}]}}"#,
        ] {
            assert!(
                object(text)
                    .unwrap_err()
                    .starts_with("duplicate field `name`"),
                "{text}"
            );
        }
        assert!(object(r#"{"a":{"name":1},"name":{"a":1}}"#).is_ok());
        let long = "x".repeat(500);
        let error = object(&format!("{{\"{long}\":1,\"{long}\":2}}")).unwrap_err();
        assert!(
            error.contains("duplicate field `xxx") && error.len() < 200,
            "{error}"
        );
    }
}
