//! The macro that declares a configuration.

/// Declares a configuration: each key once, with its member, its default and how it is read.
///
/// A key is read in its place, so that mistakes are reported in the order of the declaration.
/// Between the bars stand names for the configuration with all keys before, and for the
/// [`Keys`](crate::config::Keys); `None` keeps the default.
///
/// ```
/// use gw_shared::config::Keys;
///
/// gw_shared::configuration! {
///     pub struct Config |config, keys|
///     given {
///         pub name: String,
///     }
///     keys {
///         /// Requests at once.
///         pub slots: u16 = 7, keys.integer("slots", 1..=9);
///         pub half: u16 = 1, Some(config.slots / 2);
///     }
/// }
///
/// let mut keys = Keys::parse("slots = 8", &|_| None)?;
/// let mut config = Config::with_defaults("a".to_owned());
/// config.read(&mut keys);
/// assert_eq!((config.slots, config.half), (8, 4));
/// # Ok::<(), gw_shared::config::ConfigErrors>(())
/// ```
#[macro_export]
macro_rules! configuration {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident |$config:ident, $keys:ident|
        given {
            $($(#[$given_meta:meta])* $given_visibility:vis $given:ident: $given_type:ty,)*
        }
        keys {
            $(
                $(#[$key_meta:meta])*
                $key_visibility:vis $key:ident: $type:ty = $default:expr, $read:expr;
            )*
        }
    ) => {
        $(#[$meta])*
        $visibility struct $name {
            $($(#[$given_meta])* $given_visibility $given: $given_type,)*
            $($(#[$key_meta])* $key_visibility $key: $type,)*
        }

        impl $name {
            fn with_defaults($($given: $given_type),*) -> Self {
                Self {
                    $($key: $default,)*
                    $($given,)*
                }
            }

            /// Reads the keys. One that is missing or wrong keeps its default.
            fn read(&mut self, $keys: &mut $crate::config::Keys<'_>) {
                let $config = self;
                $(
                    if let Some(value) = $read {
                        $config.$key = value;
                    }
                )*
            }
        }
    };
}
